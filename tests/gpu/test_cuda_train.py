"""Whole runs on a CUDA device: online and from features, killed, poisoned, without a wait."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import TrainingError
from fledge.contracts.train_settings import TrainSettings
from fledge.engine.graphs import Graphs
from fledge.features import capture_job
from fledge.features.capture import capture
from fledge.store.manifest import Manifest
from fledge.testing import save_tiny_target
from fledge.training import passes, stage
from fledge.training.assembly import assemble
from fledge.training.checkpoint import list_checkpoints
from fledge.training.optimizer import Optimizer
from fledge.training.passes import CapturedPasses
from fledge.training.stage import train
from fledge.training.train_input import open_input
from fledge.training.trainer import Parts, Trainer
from tests.unit.features.capture_support import random_samples, save_corpus
from tests.unit.training.train_support import (
    EXACT,
    LENGTHS,
    SHORT,
    curve,
    losses,
    with_held_out,
    with_loss,
    with_optimizer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    save_tiny_target(folder / "target", hidden_size=64, head_dim=64)
    save_corpus(folder / "corpus", folder / "target", random_samples(LENGTHS))
    return folder


def run(folder: Path, out: Path, settings: TrainSettings, **inputs: Any) -> Manifest:
    inputs = {"corpora": [folder / "corpus"], "features": None, **inputs}
    given = open_input(
        **inputs,
        target=str(folder / "target"),
        settings=settings,
        capture=CaptureSettings(),
        is_capture_asked=False,
        device=CUDA,
    )
    return train(given, settings, out, has_plots=False)


def capture_features(folder: Path, dtype: torch.dtype) -> Path:
    out = folder / f"features-{dtype}"
    if not out.exists():
        target = str(folder / "target")
        given = capture_job.open_input(folder / "corpus", target, EXACT, dtype=dtype, device=CUDA)
        capture(given, out)
    return out


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_online_and_from_features_have_the_same_losses(
    tmp_path: Path, folder: Path, name: Any
) -> None:
    settings = with_held_out(replace(SHORT, dtype=name), decode_prompts=2, decode_tokens=6)
    features = capture_features(folder, getattr(torch, name))
    run(folder, tmp_path / "online", settings)
    run(folder, tmp_path / "offline", settings, corpora=[], features=features)
    tolerance = 1e-3 if name == "float32" else 2e-2
    for kind in ("train", "held_out"):
        ours, theirs = losses(tmp_path / "online", kind), losses(tmp_path / "offline", kind)
        assert ours == pytest.approx(theirs, rel=tolerance)
    assert len(curve(tmp_path / "online", "decode")) == 3


@pytest.mark.parametrize("loss", [{}, {"kind": "blend", "target_temperature": 0.5}], ids=str)
@pytest.mark.parametrize("keep_readings", [False, True], ids=["read", "kept"])
def test_a_gpu_has_the_losses_of_a_cpu(
    tmp_path: Path, folder: Path, loss: dict[str, Any], keep_readings: bool
) -> None:
    settings = replace(with_loss(SHORT, **loss), dtype="float32", keep_readings=keep_readings)
    run(folder, tmp_path / "cuda", settings)
    given = open_input(
        features=None,
        corpora=[folder / "corpus"],
        target=str(folder / "target"),
        settings=settings,
        capture=CaptureSettings(),
        is_capture_asked=False,
        device=torch.device("cpu"),
    )
    train(given, settings, tmp_path / "cpu", has_plots=False)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_steps_never_wait_for_the_device(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first ones, which compile and fill caches."""
    take_step: Callable[..., None] = Trainer._take_step

    def watched(trainer: Trainer, step: int, coming: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        try:
            take_step(trainer, step, coming)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_take_step", watched)
    settings = replace(with_held_out(SHORT, every=100), max_steps=8, epochs=5)
    run(folder, tmp_path / "online", settings)
    features = capture_features(folder, torch.bfloat16)
    run(folder, tmp_path / "offline", settings, corpora=[], features=features)
    kept = replace(with_loss(settings, target_temperature=0.5, early_steps=1), keep_readings=True)
    run(folder, tmp_path / "kept", kept)
    for name in ("online", "offline", "kept"):
        assert len(curve(tmp_path / name)) == 8


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_captured_steps_learn_what_launched_ones_do(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Sizes come again in later epochs, with other samples in other places."""
    settings = replace(with_held_out(SHORT, every=100), max_steps=60, epochs=20)
    settings = with_loss(with_optimizer(settings, kind=kind, ema=0.9), early_steps=2)
    counted: list[Graphs] = []

    def watched(*args: Any, **more: Any) -> Parts:
        parts = assemble(*args, **more)
        if isinstance(parts.passes, CapturedPasses):
            counted.append(parts.passes._graphs)
        return parts

    monkeypatch.setattr(stage, "assemble", watched)
    run(folder, tmp_path / "captured", settings)
    monkeypatch.setattr(stage, "assemble", partial(assemble, is_captured=False))
    run(folder, tmp_path / "launched", settings)
    assert counted[0].is_capturing
    assert counted[0].counts.replayed > 120 + 30  # all but two of clip and step, and many passes
    for part in ("train", "held_out"):
        ours, theirs = losses(tmp_path / "captured", part), losses(tmp_path / "launched", part)
        assert ours == pytest.approx(theirs, rel=2e-2)


def test_passes_without_room_for_a_second_one_are_launched(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph would keep memory that launched passes need as well."""
    monkeypatch.setattr(passes, "_ROOM", 1e9)
    settings = replace(with_held_out(SHORT, every=100), max_steps=12, epochs=20)
    run(folder, tmp_path / "run", settings)
    monkeypatch.setattr(stage, "assemble", partial(assemble, is_captured=False))
    run(folder, tmp_path / "launched", settings)
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "launched")
    assert ours == pytest.approx(theirs, rel=2e-2)


def test_the_state_before_a_bad_step_is_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host learns of it a step late; the weights did not move meanwhile."""
    clip: Callable[..., Tensor] = Optimizer.clip
    steps = itertools.count()

    def poisoned(optimizer: Optimizer) -> Tensor:
        weight = next(iter(optimizer.weights.values()))
        if next(steps) == 3 and weight.grad is not None:
            weight.grad.fill_(float("nan"))
        return clip(optimizer)

    monkeypatch.setattr(Optimizer, "clip", poisoned)
    settings = with_held_out(SHORT, every=100)
    with pytest.raises(TrainingError, match=r"step 4 .* state after step 3 is kept"):
        run(folder, tmp_path / "run", settings)
    monkeypatch.undo()
    assert [record.step for record in list_checkpoints(tmp_path / "run")] == [3]
    run(folder, tmp_path / "run", settings)
    run(folder, tmp_path / "whole", settings)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-2)
