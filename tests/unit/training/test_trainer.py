"""Runs that are cut, repeated, poisoned and ended early."""

import errno
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    MismatchError,
    TrainingError,
)
from fledge.models.head_files import load_head
from fledge.store.corpus_shard import Sample
from fledge.store.manifest import read_manifest
from fledge.testing import save_tiny_target
from fledge.training.checkpoint import checkpoint_path, list_checkpoints
from fledge.training.measuring import Measures
from fledge.training.order import divide
from fledge.training.stage import measure_speed, require_one_start
from tests.unit.features.capture_support import random_samples, save_corpus
from tests.unit.training.train_support import (
    LENGTHS,
    SHORT,
    Notes,
    curve,
    losses,
    run,
    with_held_out,
    with_loss,
    with_optimizer,
)

RICH = replace(with_optimizer(SHORT, ema=0.9), hidden_noise=0.1)
"""Everything that has a state or draws random numbers."""


@pytest.fixture(scope="module")
def unbroken(folder: Path, tiny_target: Path, tiny_features: Path) -> Path:
    run(tiny_target, folder / "unbroken", RICH, features=tiny_features)
    return folder / "unbroken"


def _die_at(step: int) -> Callable[[int], None]:
    def at_step(number: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_step


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, tiny_target: Path, tiny_features: Path, unbroken: Path
) -> None:
    out, kill_at = tmp_path / "run", random.Random(os.getpid()).randint(1, 6)
    child = os.fork()
    if child == 0:
        run(tiny_target, out, RICH, features=tiny_features, progress=Notes(_die_at(kill_at)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (out / "manifest.json").exists()
    notes = Notes()
    manifest = run(tiny_target, out, RICH, features=tiny_features, progress=notes)
    saved = (kill_at - 1) // 2 * 2  # steps were advanced before their checkpoint was written
    told = [line for line in notes.lines if "steps were taken before" in line]
    assert told == ([f"{saved} of 6 steps were taken before."] if saved else [])
    for kind in ("train", "held_out"):
        assert curve(out, kind) == curve(unbroken, kind), f"killed at step {kill_at}"
    assert manifest.fingerprint == read_manifest(unbroken).fingerprint
    for name in ("model.safetensors", "state.safetensors"):
        files = [checkpoint_path(place, 6) / name for place in (out, unbroken)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_finished_run_is_left_alone(
    tiny_target: Path, tiny_features: Path, unbroken: Path
) -> None:
    before = (unbroken / "curves.jsonl").read_bytes()
    again = run(tiny_target, unbroken, RICH, features=tiny_features)
    assert again.fingerprint == read_manifest(unbroken).fingerprint
    assert (unbroken / "curves.jsonl").read_bytes() == before


def test_a_run_that_was_killed_behind_its_last_step_is_finished(
    tmp_path: Path, tiny_target: Path, tiny_features: Path, unbroken: Path
) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    for name in ("manifest.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    again = run(tiny_target, tmp_path / "run", RICH, features=tiny_features)
    assert again.fingerprint == read_manifest(unbroken).fingerprint
    assert curve(tmp_path / "run") == curve(unbroken)


def test_another_way_to_share_the_work_is_the_same_run(
    tiny_target: Path, tiny_features: Path, unbroken: Path
) -> None:
    settings = replace(RICH, parallel="fsdp", keep_checkpoints=3)
    run(tiny_target, unbroken, settings, features=tiny_features)


def test_other_settings_are_refused(
    tiny_target: Path, tiny_features: Path, tiny_corpus: Path, unbroken: Path
) -> None:
    other = with_optimizer(RICH, learning_rate=1e-3)
    message = r"optimizer.learning_rate = 0.0004, and this run has .* = 0.001"
    with pytest.raises(MismatchError, match=message):
        run(tiny_target, unbroken, other, features=tiny_features)
    with pytest.raises(MismatchError, match="parents.features"):
        run(tiny_target, unbroken, RICH, corpus=tiny_corpus)


def test_the_directory_is_a_head_with_the_best_weights(unbroken: Path) -> None:
    counts = read_manifest(unbroken).counts
    assert counts["steps"] == counts["planned_steps"] == 6
    assert counts["mode"] == "features"
    assert counts["samples"] + counts["samples_held_out"] == len(LENGTHS)
    best = checkpoint_path(unbroken, counts["best_step"])
    served, kept = load_head(unbroken).state_dict(), load_head(best).state_dict()
    assert all(torch.equal(served[name], kept[name]) for name in kept)
    records = list_checkpoints(unbroken)
    assert [record.step for record in records] == [2, 4, 6]
    assert counts["best"] == max((record.measures for record in records), key=_promise)
    speed = measure_speed(unbroken)
    assert speed["tokens_per_s"] is not None
    assert speed["tokens_per_s"] > 0


def _promise(measures: object) -> float:
    assert isinstance(measures, dict)
    return float(measures["ideal_speed_up"])


def test_held_out_samples_are_never_trained_on(tmp_path: Path, tiny_target: Path) -> None:
    """Their tokens may change as they like: the trained weights stay."""
    samples = random_samples(LENGTHS)
    held_out = held_out_rows(samples)
    changed = [
        one._replace(token_ids=one.token_ids[:: -1 if one.row_id in held_out else 1].copy())
        for one in samples
    ]
    outs = [tmp_path / "run-1", tmp_path / "run-2"]
    for out, kept in zip(outs, (samples, changed), strict=True):
        run(tiny_target, out, corpus=save_corpus(tmp_path / f"of-{out.name}", tiny_target, kept))
    assert curve(outs[0]) == curve(outs[1])
    assert losses(outs[0], "held_out") != losses(outs[1], "held_out")


def held_out_rows(samples: Sequence[Sample]) -> set[str]:
    """Ids of the rows that a short run holds out."""
    hashes = [xxhash.xxh3_64_intdigest(sample.row_id.encode()) for sample in samples]
    chosen = divide(np.array(hashes, np.uint64), SHORT.held_out.share).held_out
    return {samples[place].row_id for place in chosen}


@pytest.mark.parametrize("mean", ["labels", "positions"])
def test_accumulated_steps_are_those_of_one_large_batch(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, mean: str
) -> None:
    """All samples in one step, in many micro-batches or in one."""
    outs = [tmp_path / name for name in ("many", "one")]
    for out, micro_tokens in zip(outs, (96, 2304), strict=True):
        settings = replace(SHORT, micro_tokens=micro_tokens, batch_tokens=2304, epochs=1)
        run(tiny_target, out, with_loss(settings, mean=mean), corpus=tiny_corpus)
    ((_, many),), ((_, one),) = curve(outs[0]), curve(outs[1])
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert many["num_labels"] == one["num_labels"]
    ours, theirs = (load_head(out).state_dict() for out in outs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "nan", seed=1)
    corpus, bad = _poisoned(tmp_path, target)
    settings = with_held_out(SHORT, every=1)
    with pytest.raises(TrainingError) as caught:
        run(target, tmp_path / "run", settings, corpus=corpus)
    steps = len(curve(tmp_path / "run"))
    message = str(caught.value)
    assert f"the loss of step {steps + 1} is nan, in a micro-batch of sample {bad} " in message
    kept = f"The state after step {steps} is kept as the last checkpoint."
    assert (kept if steps else "There is no checkpoint yet.") in message
    assert [record.step for record in list_checkpoints(tmp_path / "run")] == [*range(1, steps + 1)]


def _poisoned(folder: Path, target: Path) -> tuple[Path, int]:
    """A corpus in which one sample has a token whose embedding is no number."""
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = math.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    samples = random_samples(LENGTHS)
    held_out = held_out_rows(samples)
    bad = next(place for place, one in enumerate(samples) if one.row_id not in held_out)
    samples[bad].token_ids[3] = 5
    return save_corpus(folder / "poisoned", target, samples), bad


def test_state_between_checkpoints_is_kept_when_a_loss_is_no_number(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "nan", seed=1)
    corpus, _ = _poisoned(tmp_path, target)
    settings = with_held_out(replace(SHORT, seed=4), every=5)
    with pytest.raises(TrainingError, match="is kept as the last checkpoint"):
        run(target, tmp_path / "run", settings, corpus=corpus)
    steps = len(curve(tmp_path / "run"))
    assert steps > 0
    assert [record.step for record in list_checkpoints(tmp_path / "run")] == [steps]


def test_a_run_may_be_ended_at_a_measurement(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    seen: list[int] = []

    def watch(step: int, measures: Measures) -> bool:
        seen.append(step)
        assert measures.depth.num_labels > 0
        return step == 4

    manifest = run(tiny_target, tmp_path / "run", features=tiny_features, watch=watch)
    assert seen == [2, 4]
    assert (manifest.counts["steps"], manifest.counts["planned_steps"]) == (4, 6)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_run_that_was_ended_stays_ended_after_a_kill(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    out = tmp_path / "run"
    ended = run(tiny_target, out, features=tiny_features, watch=lambda step, _: step == 4)
    # As a kill leaves it between the last checkpoint and the end.
    (out / "manifest.json").unlink()
    again = run(tiny_target, out, features=tiny_features, watch=lambda step, _: False)
    assert again.fingerprint == ended.fingerprint
    assert len(curve(out)) == 4


def test_prompts_without_room_are_said(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    settings = with_held_out(replace(SHORT, max_steps=1), decode_prompts=2, decode_tokens=507)
    notes = Notes()
    manifest = run(tiny_target, tmp_path / "run", settings, features=tiny_features, progress=notes)
    assert manifest.counts["best"]["accept_length"] is None
    assert any("accept length is not measured" in line for line in notes.lines)


def test_processes_that_see_other_checkpoints_are_refused() -> None:
    require_one_start(Path("run"), [4, 4])
    with pytest.raises(ArtifactError, match=r"from step 4 of run, and process 1 finds step 0"):
        require_one_start(Path("run"), [4, 0, 0])


def test_checkpoints_come_when_they_are_asked_for(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    settings = replace(with_held_out(SHORT, every=4), checkpoint_every=3)
    run(tiny_target, tmp_path / "run", settings, features=tiny_features)
    records = list_checkpoints(tmp_path / "run")
    assert [record.step for record in records] == [3, 6]
    assert [bool(record.measures) for record in records] == [False, True]
    assert [step for step, _ in curve(tmp_path / "run", "held_out")] == [4, 6]


def test_a_run_that_holds_nothing_out_measures_nothing(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    settings = with_held_out(SHORT, share=0.0)
    manifest = run(tiny_target, tmp_path / "run", settings, features=tiny_features)
    assert manifest.counts["samples"] == len(LENGTHS)
    assert manifest.counts["best_step"] == 6
    assert manifest.counts["best"] == {}
    assert curve(tmp_path / "run", "held_out") == []


def test_the_bar_shows_loss_and_accept_length(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    settings = with_held_out(SHORT, decode_prompts=2, decode_tokens=6)
    notes = Notes()
    run(tiny_target, tmp_path / "run", settings, corpus=tiny_corpus, progress=notes)
    assert len(notes.labels) == 6
    assert notes.labels[0].startswith("training, loss ")
    assert ", accept length 1." in notes.labels[-1]
    assert any(line.startswith("step 2 of 6, held out: loss ") for line in notes.lines)
    decoded = curve(tmp_path / "run", "decode")
    assert [step for step, _ in decoded] == [2, 4, 6]
    assert read_manifest(tmp_path / "run").counts["best"]["accept_length"] >= 1.0


def test_memory_that_runs_out_in_a_step_is_explained(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("fledge.training.ttt.TTTModule.forward", fail)
    large = replace(SHORT, micro_tokens=192)
    with pytest.raises(CapacityError, match=r"at step 1; lower train.micro_tokens from 192 to 96"):
        run(tiny_target, tmp_path / "run", large, corpus=tiny_corpus)
    monkeypatch.undo()
    # Nothing was saved yet, so the same directory takes other settings.
    smaller = with_loss(replace(SHORT, max_steps=1), steps=2)
    run(tiny_target, tmp_path / "run", smaller, corpus=tiny_corpus)


def test_a_full_disk_is_explained(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fledge.training.checkpoint.save_file", fail)
    with pytest.raises(CapacityError, match="run the same command again: it goes on"):
        run(tiny_target, tmp_path / "run", corpus=tiny_corpus)
    assert list_checkpoints(tmp_path / "run") == []
    monkeypatch.undo()
    assert run(tiny_target, tmp_path / "run", corpus=tiny_corpus).counts["steps"] == 6


def test_too_few_conversations_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    corpus = save_corpus(tmp_path / "one", tiny_target, random_samples([40]))
    with pytest.raises(ConfigError, match="hold out none with --set train.held_out.share=0"):
        run(tiny_target, tmp_path / "run", corpus=corpus)


def test_curves_are_plain_lines(unbroken: Path) -> None:
    lines = (unbroken / "curves.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["train", "train", "held_out"] * 3
