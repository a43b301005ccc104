"""Where curves are shown while a run goes on: TensorBoard, and Weights & Biases where it is set up.

TensorBoard files lie in `tensorboard/` of the run directory. Weights & Biases is used when the
package is installed and one of `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_API_KEY` is set; without a key
it writes below the run directory, to be sent with `wandb sync`. It never asks for a login.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fledge.contracts.progress import Progress
from fledge.training.metrics import Figure

_WANDB_NAMES = ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY")


class Mirror(Protocol):
    """Shows figures somewhere else."""

    def add(self, step: int, kind: str, figures: Mapping[str, Figure]) -> None:
        """Figures of one record."""

    def close(self) -> None:
        """Nothing comes any more."""


def open_mirrors(directory: Path, purged_from: int | None, progress: Progress) -> list[Mirror]:
    """Whoever is installed; a resumed run shows nothing of its first life from `purged_from` on."""
    found = [
        _open_tensorboard(directory, purged_from, progress),
        _open_wandb(directory, progress),
    ]
    return [mirror for mirror in found if mirror is not None]


def flat(kind: str, figures: Mapping[str, Figure]) -> dict[str, float]:
    """One number per name; a figure per depth becomes several names, counted from 1."""
    scalars: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, list):
            for depth, one in enumerate(value, start=1):
                if one is not None:
                    scalars[f"{kind}/{name}/{depth}"] = one
        elif value is not None:
            scalars[f"{kind}/{name}"] = value
    return scalars


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add(self, step: int, kind: str, figures: Mapping[str, Figure]) -> None:
        for name, value in flat(kind, figures).items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, run: Any) -> None:
        self._run = run

    def add(self, step: int, kind: str, figures: Mapping[str, Figure]) -> None:
        # Its own step may never go back, which a resumed run does; ours is a figure like others.
        self._run.log({**flat(kind, figures), "step": step})

    def close(self) -> None:
        self._run.finish()


def _open_tensorboard(
    directory: Path, purged_from: int | None, progress: Progress
) -> Mirror | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        progress.note(
            "TensorBoard is not installed, so curves go to curves.jsonl and the plot only; "
            "`pip install tensorboard` shows them live."
        )
        return None
    place = str(directory / "tensorboard")
    return _TensorBoard(SummaryWriter(place, purge_step=purged_from))


def _open_wandb(directory: Path, progress: Progress) -> Mirror | None:
    if not any(os.environ.get(name) for name in _WANDB_NAMES):
        return None
    try:
        import wandb
    except ImportError:
        progress.note("WANDB settings are there but the package wandb is not installed; left out.")
        return None
    mode = os.environ.get("WANDB_MODE") or (
        "online" if os.environ.get("WANDB_API_KEY") else "offline"
    )
    run = wandb.init(
        mode=mode,
        id=_run_id(directory / "wandb" / "run-id.txt"),
        project=os.environ.get("WANDB_PROJECT", "fledge"),
        name=directory.resolve().name,
        dir=str(directory),
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("*", step_metric="step")
    return _WeightsAndBiases(run)


def _run_id(path: Path) -> str:
    """Drawn once for a run directory: a run that was resumed is the same one there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(6))
    return path.read_text()
