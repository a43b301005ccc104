"""Samples from a corpus beside the target, and from features: the same micro-batches."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.models.target import Target
from fledge.store.corpus import Corpus
from fledge.training.assembly import assemble, load_target
from fledge.training.distributed import Processes
from fledge.training.sources import Prefetcher, Source, iterate, padded
from fledge.training.train_input import TrainInput
from tests.unit.features.capture_support import random_samples, run_capture, save_corpus
from tests.unit.training.train_support import (
    SHORT,
    curve,
    losses,
    opened,
    run,
    with_loss,
)

PLANS = [(0, 5, 2), (7,), (3, 4)]


@pytest.fixture(scope="module")
def loaded(tiny_target: Path, tiny_corpus: Path) -> Target:
    return load_target(opened(tiny_target, corpus=tiny_corpus), SHORT, SilentProgress())


def source_of(given: TrainInput, target: Target) -> Source:
    return assemble(given, SHORT, target, Processes()).source


def test_both_ways_know_the_same_samples(
    tiny_target: Path, tiny_corpus: Path, tiny_features: Path
) -> None:
    online = opened(tiny_target, corpus=tiny_corpus)
    offline = opened(tiny_target, features=tiny_features)
    for ours, theirs in zip(online.samples[:3], offline.samples[:3], strict=True):
        assert np.array_equal(ours, theirs)
    assert online.taps == offline.taps
    ids = [sample.row_id for sample in Corpus.open(tiny_corpus)]
    hashes = [xxhash.xxh3_64_intdigest(row_id.encode()) for row_id in ids]
    assert online.samples.row_hashes.tolist() == [hashes[n] for n in online.samples.numbers]


def test_both_ways_give_the_same_micro_batches(
    tiny_target: Path, tiny_corpus: Path, tiny_features: Path, loaded: Target
) -> None:
    online = source_of(opened(tiny_target, corpus=tiny_corpus), loaded)
    offline = source_of(opened(tiny_target, features=tiny_features), loaded)
    pairs = zip(iterate(online, PLANS), iterate(offline, PLANS), strict=True)
    for ours, theirs in pairs:
        assert ours.sample_numbers == theirs.sample_numbers
        assert torch.equal(ours.token_ids_T, theirs.token_ids_T)
        assert torch.equal(ours.loss_mask_T, theirs.loss_mask_T)
        assert torch.equal(ours.targets.rows_R, theirs.targets.rows_R)
        assert torch.equal(ours.targets.greedy_R, theirs.targets.greedy_R)
        assert torch.allclose(ours.targets.log_mass_R, theirs.targets.log_mass_R, atol=1e-5)
        assert ours.targets.final_RD is not None
        assert theirs.targets.final_RD is not None
        assert torch.allclose(ours.targets.final_RD, theirs.targets.final_RD, atol=1e-4)
        is_kept = theirs.features_TF.abs().sum(dim=1) > 0
        assert torch.allclose(
            ours.features_TF[is_kept], theirs.features_TF[is_kept], atol=1e-4, rtol=1e-4
        )
    said, stored = online.said(3), offline.said(3)
    assert np.array_equal(said.token_ids, stored.token_ids)
    assert np.array_equal(said.loss_mask, stored.loss_mask)


@pytest.mark.parametrize(
    "loss",
    [{}, {"kind": "acceptance", "target_temperature": 0.5}, {"kind": "blend"}],
    ids=str,
)
def test_both_ways_of_training_have_the_same_losses(
    tmp_path: Path,
    tiny_target: Path,
    tiny_corpus: Path,
    tiny_features: Path,
    loss: dict[str, Any],
) -> None:
    settings = with_loss(SHORT, **loss)
    run(tiny_target, tmp_path / "online", settings, corpus=tiny_corpus)
    run(tiny_target, tmp_path / "offline", settings, features=tiny_features)
    for name in ("train", "held_out"):
        ours, theirs = losses(tmp_path / "online", name), losses(tmp_path / "offline", name)
        assert len(ours) == (6 if name == "train" else 3)
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_rounded_features_and_tops_of_distributions_are_close(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    run(tiny_target, tmp_path / "online", corpus=tiny_corpus)
    for name, capture in {
        "q8": CaptureSettings(features="q8", target="hidden", target_features="q8"),
        "top": CaptureSettings(features="q8", target="topk", top_k=100),
    }.items():
        run_capture(tiny_corpus, tiny_target, tmp_path / f"features-{name}", capture)
        run(tiny_target, tmp_path / name, features=tmp_path / f"features-{name}")
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "online"), rel=0.03)
    with pytest.raises(ConfigError, match=r"target_temperature is 0\.5, .* temperature 1 only"):
        opened(
            tiny_target,
            features=tmp_path / "features-top",
            settings=with_loss(SHORT, target_temperature=0.5),
        )


def test_padding_changes_nothing(tiny_target: Path, tiny_corpus: Path, loaded: Target) -> None:
    parts = assemble(opened(tiny_target, corpus=tiny_corpus), SHORT, loaded, Processes())
    ones_K = torch.ones(SHORT.loss.steps)
    batch = parts.source.put(parts.source.load((0, 1)))
    wide = padded(batch, 128)
    assert wide.documents.num_tokens == wide.features_TF.shape[0] == 128
    assert padded(batch, None) is batch
    plain, filled = (parts.passes.learn(one, ones_K, None, is_last=True) for one in (batch, wide))
    assert torch.allclose(plain.loss, filled.loss, rtol=1e-6)
    assert torch.allclose(plain.sums.packed(), filled.sums.packed(), rtol=1e-5)


def test_micro_batches_are_loaded_ahead_and_waiting_is_counted() -> None:
    begun: list[int] = []

    def load(positions: Sequence[int]) -> int:
        begun.append(positions[0])
        time.sleep(0.02)
        return positions[0]

    with Prefetcher(load, [(number,) for number in range(6)], ahead=3) as coming:
        assert next(coming) == 0
        assert len(begun) >= 2
        assert coming.waited_s > 0
        assert list(coming) == [1, 2, 3, 4, 5]


def test_what_fails_while_loading_comes_out_in_its_place() -> None:
    def load(positions: object) -> None:
        raise ArtifactError("sample 3 is damaged")

    with (
        Prefetcher(load, [(1,)], ahead=1) as coming,
        pytest.raises(ArtifactError, match="sample 3 is damaged"),
    ):
        next(coming)


def test_samples_that_do_not_fit_a_micro_batch_are_refused(
    tiny_target: Path, tiny_corpus: Path
) -> None:
    settings = replace(SHORT, micro_tokens=64, batch_tokens=64)
    with pytest.raises(ConfigError, match="micro_tokens is 64, and sample 14 .* has 90 tokens"):
        opened(tiny_target, corpus=tiny_corpus, settings=settings)


def test_a_corpus_that_teaches_nothing_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    silent = [sample._replace(loss_mask=sample.loss_mask & False) for sample in random_samples([9])]
    corpus = save_corpus(tmp_path / "silent", tiny_target, silent)
    with pytest.raises(ArtifactError, match="nothing to learn"):
        opened(tiny_target, corpus=corpus)


def test_curves_say_how_far_it_went(tmp_path: Path, tiny_target: Path, tiny_corpus: Path) -> None:
    run(tiny_target, tmp_path / "run", corpus=tiny_corpus)
    steps = curve(tmp_path / "run")
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "grad_norm", "learning_rate", "tokens", "accuracy_at_depth"} <= set(steps[0][1])
