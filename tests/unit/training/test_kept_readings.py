"""What a target said once, against a target that reads every micro-batch.

Catches: rows of a neighbouring sample, samples that come twice in a micro-batch, held-out samples
that were not read, padding that is kept, and memory that is not there.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.errors import CapacityError, ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.training.assembly import assemble, load_target
from fledge.training.distributed import Processes
from fledge.training.kept_readings import KeptReadings, KeptShape, KeptSizes, consecutive
from fledge.training.sources import iterate
from fledge.training.train_plan import plan_training
from tests.unit.training.train_support import SHORT, losses, opened, run

KEPT = replace(SHORT, keep_readings=True)


def test_kept_readings_are_those_of_the_target(tiny_target: Path, tiny_corpus: Path) -> None:
    given = opened(tiny_target, corpus=tiny_corpus)
    target = load_target(given, SHORT, SilentProgress())
    live, kept = (
        assemble(given, settings, target, Processes()).source for settings in (SHORT, KEPT)
    )
    plans = [(5, 0, 2), (7,), (3, 4, 3)]
    for ours, theirs in zip(iterate(kept, plans), iterate(live, plans), strict=True):
        assert ours.sample_numbers == theirs.sample_numbers
        assert ours.first_labels == theirs.first_labels
        assert torch.equal(ours.token_ids_T, theirs.token_ids_T)
        assert torch.equal(ours.targets.rows_R, theirs.targets.rows_R)
        assert torch.equal(ours.targets.greedy_R, theirs.targets.greedy_R)
        assert ours.targets.final_RD is not None
        assert theirs.targets.final_RD is not None
        for one, other in (
            (ours.features_TF, theirs.features_TF),
            (ours.targets.final_RD, theirs.targets.final_RD),
            (ours.targets.log_mass_R, theirs.targets.log_mass_R),
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kept_format", "error"), [("q8", 0.01), ("q5", 0.07)])
def test_kept_readings_may_be_coded(
    tiny_target: Path, tiny_corpus: Path, kept_format: FeatureFormat, error: float
) -> None:
    given = opened(tiny_target, corpus=tiny_corpus)
    target = load_target(given, SHORT, SilentProgress())
    coded = replace(KEPT, kept_format=kept_format)
    exact, rounded = (
        assemble(given, settings, target, Processes()).source for settings in (KEPT, coded)
    )
    plans = [(5, 0, 2), (7,), (3, 4, 3)]
    for ours, theirs in zip(iterate(rounded, plans), iterate(exact, plans), strict=True):
        assert torch.equal(ours.targets.greedy_R, theirs.targets.greedy_R)
        assert ours.targets.final_RD is not None
        assert theirs.targets.final_RD is not None
        spread = theirs.features_TF.std(dim=0)
        lost = ((ours.features_TF - theirs.features_TF) / spread).square().mean().sqrt()
        assert 0 < lost < error
        difference = (ours.targets.final_RD - theirs.targets.final_RD).norm()
        assert 0 < difference < 0.01 * theirs.targets.final_RD.norm()


def test_coded_readings_take_less_memory(tiny_target: Path, tiny_corpus: Path) -> None:
    given = opened(tiny_target, corpus=tiny_corpus)
    sizes = [
        plan_training(given, replace(KEPT, kept_format=one), itemsize=2).device_bytes
        for one in ("exact", "q8", "q5")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_format_needs_something_that_is_kept() -> None:
    with pytest.raises(ConfigError, match='kept_format is "q8" and keep_readings false'):
        replace(SHORT, kept_format="q8")


def test_runs_have_the_same_losses(tmp_path: Path, tiny_target: Path, tiny_corpus: Path) -> None:
    for name, settings in {"live": SHORT, "kept": KEPT}.items():
        run(tiny_target, tmp_path / name, settings, corpus=tiny_corpus)
    for kind in ("train", "held_out"):
        ours, theirs = losses(tmp_path / "kept", kind), losses(tmp_path / "live", kind)
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_a_run_may_go_on_without_keeping(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    kept = run(tiny_target, tmp_path / "kept", KEPT, corpus=tiny_corpus)
    assert run(tiny_target, tmp_path / "kept", SHORT, corpus=tiny_corpus) == kept


def test_a_plan_knows_what_is_kept_and_read_once(tiny_target: Path, tiny_corpus: Path) -> None:
    given = opened(tiny_target, corpus=tiny_corpus)
    live, kept = (
        plan_training(given, settings, itemsize=4, flops_per_s=1e9) for settings in (SHORT, KEPT)
    )
    hidden_size = given.config.hidden_size
    features_bytes = int(given.samples.lengths.sum()) * 4 * hidden_size * len(given.taps)
    assert kept.device_bytes > live.device_bytes + features_bytes
    longer = replace(KEPT, epochs=20, max_steps=0)
    many, many_live = (
        plan_training(given, settings, itemsize=4, flops_per_s=1e9)
        for settings in (longer, replace(longer, keep_readings=False))
    )
    assert many.seconds is not None
    assert many_live.seconds is not None
    assert many.seconds < many_live.seconds


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([], []),
        ([50], [[0]]),
        ([5, 5, 1, 9, 10, 3], [[0, 1], [2, 3], [4], [5]]),
        ([10, 10], [[0], [1]]),
    ],
)
def test_samples_are_read_in_order_and_whole(lengths: list[int], batches: list[list[int]]) -> None:
    found = consecutive(np.array(lengths, np.int64), 10)
    assert [list(batch) for batch in found] == batches


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (2_000_000, r"4\.1 MB .* 2\.0 MB free"),
        (4_500_000, r"4\.1 MB .* 4\.5 MB free and needs 1\.0 MB of them for steps"),
    ],
)
def test_memory_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, free: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10_000_000))
    one = np.array([1000], np.int64)
    with pytest.raises(CapacityError, match=f"keep_readings would keep {said}"):
        KeptReadings(
            KeptSizes(np.array([0]), one, one),
            KeptShape(num_taps=3, hidden_size=256, format="exact"),
            dtype=torch.float32,
            device=torch.device("cuda"),
        )


def test_features_are_kept_on_disk_already(tiny_target: Path, tiny_features: Path) -> None:
    with pytest.raises(ConfigError, match="with --features no target reads anything"):
        opened(tiny_target, features=tiny_features, settings=KEPT)
