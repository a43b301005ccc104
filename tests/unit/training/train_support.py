"""Short runs on tiny targets: what they read, how they are started, what their curves say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.progress import Progress
from fledge.contracts.train_settings import HeldOutSettings, LossSettings, TrainSettings
from fledge.store.manifest import Manifest
from fledge.training.curves import read_curves
from fledge.training.stage import train
from fledge.training.train_input import TrainInput, open_input

CPU = torch.device("cpu")
LENGTHS = [40, 50, 60, 30, 20, 80, 90, 25] * 3
EXACT = CaptureSettings(
    features="exact", target="hidden", target_features="exact", pass_tokens=96, shard_tokens=200
)
"""Nothing is lost on the way to the disk, and several shards."""

SHORT = TrainSettings(
    epochs=2,
    max_steps=6,
    micro_tokens=96,
    batch_tokens=192,
    loss=LossSettings(steps=3),
    held_out=HeldOutSettings(share=0.1, every=2, decode_prompts=0),
)


def opened(
    target: Path,
    *,
    corpus: Path | None = None,
    beside: Sequence[Path] = (),
    features: Path | None = None,
    settings: TrainSettings = SHORT,
    capture: CaptureSettings | None = None,
    start: Path | None = None,
) -> TrainInput:
    return open_input(
        features=features,
        corpora=[*([] if corpus is None else [corpus]), *beside],
        target=str(target),
        settings=settings,
        capture=capture or CaptureSettings(),
        is_capture_asked=capture is not None,
        start=start,
        device=CPU,
    )


def run(
    target: Path,
    out: Path,
    settings: TrainSettings = SHORT,
    *,
    corpus: Path | None = None,
    beside: Sequence[Path] = (),
    features: Path | None = None,
    start: Path | None = None,
    progress: Progress | None = None,
    **more: Any,
) -> Manifest:
    given = opened(
        target, corpus=corpus, beside=beside, features=features, settings=settings, start=start
    )
    # Plots take longer than these runs, and are tested by themselves.
    return train(given, settings, out, progress=progress, has_plots=False, **more)


def curve(out: Path, kind: str = "train") -> list[tuple[int, dict[str, Any]]]:
    """Steps and figures, without what a clock said."""
    return [(one.step, dict(one.figures)) for one in read_curves(out) if one.kind == kind]


def losses(out: Path, kind: str = "train") -> list[Any]:
    return [figures["loss"] for _, figures in curve(out, kind)]


def with_loss(settings: TrainSettings, **changes: Any) -> TrainSettings:
    return replace(settings, loss=replace(settings.loss, **changes))


def with_optimizer(settings: TrainSettings, **changes: Any) -> TrainSettings:
    return replace(settings, optimizer=replace(settings.optimizer, **changes))


def with_held_out(settings: TrainSettings, **changes: Any) -> TrainSettings:
    return replace(settings, held_out=replace(settings.held_out, **changes))


class Notes:
    """A progress that remembers what was said, and may do something at each step."""

    def __init__(self, at_step: Callable[[int], None] | None = None) -> None:
        self.lines: list[str] = []
        self.labels: list[str] = []
        self._at_step = at_step
        self._steps = 0

    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> "Notes":
        self._is_training = label == "training"
        return self

    def __enter__(self) -> "Notes":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, amount: int) -> None:
        if self._is_training and self._at_step is not None:
            self._steps += 1
            self._at_step(self._steps)

    def update_total(self, total: int) -> None:
        del total

    def update_label(self, label: str) -> None:
        self.labels.append(label)
