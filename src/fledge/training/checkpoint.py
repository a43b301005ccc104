"""Checkpoints: heads that `fledge generate --head` loads as they are, and what goes on from them.

    checkpoints/step-00000400/
      config.json, model.safetensors    the head; with an average of the weights, that average
      state.safetensors                 what the optimizer remembers; the weights beside an average
      checkpoint.json                   step, tokens, measures, and a checksum of each file

A checkpoint appears by one rename, whole or not at all. Random numbers and the order of the data
are functions of the seed and the step, so the step is all there is to say about them.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head, write_head_files
from fledge.store.cache_publish import publish_directory
from fledge.store.manifest import write_json

CHECKPOINTS = "checkpoints"
RECORD_NAME = "checkpoint.json"
_STATE_NAME = "state.safetensors"
_NUM_RESUMABLE = 2
"""Newest checkpoints that keep their state: the newest, and one to fall back on."""

_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.step-\d+\.\d+\.(tmp|old)")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that a run goes on from; tensors are whole and on the CPU."""

    step: int
    """Steps taken."""

    tokens: int
    """Tokens trained on."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    """Of the optimizer, by weight and kind."""

    average: Mapping[str, Tensor] | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured on held-out samples at this step."""

    is_over: bool = False
    """The run was ended here, whatever steps are left."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a checkpoint says about itself."""

    directory: Path
    step: int
    tokens: int
    measures: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    is_over: bool

    @property
    def score(self) -> float | None:
        """Accept length on held-out prompts, or what the curves promise where none was decoded."""
        found = self.measures.get("accept_length")
        return found if found is not None else self.measures.get("ideal_speed_up")


def checkpoint_path(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def write_checkpoint(run: Path, head: Eagle3Head, state: TrainState) -> Path:
    """Publish a checkpoint; `head` holds the weights that are to be served."""
    path = checkpoint_path(run, state.step)
    with publish_directory(path) as staging:
        write_head_files(head, staging)
        save_file(_state_tensors(state), staging / _STATE_NAME)
        (staging / _STATE_NAME).chmod((staging / "config.json").stat().st_mode)
        files = {file.name: _entry(file) for file in sorted(staging.iterdir())}
        record = {
            "step": state.step,
            "tokens": state.tokens,
            "measures": dict(state.measures),
            "is_over": state.is_over,
            "files": files,
        }
        write_json(staging / RECORD_NAME, record)
    return path


def list_checkpoints(run: Path) -> list[Record]:
    """The checkpoints of a run whose record can be read, oldest first."""
    folder = run / CHECKPOINTS
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    records = [_read_record(path) for path in found if _NAME.fullmatch(path.name)]
    return sorted((one for one in records if one is not None), key=lambda one: one.step)


def load_newest(run: Path, progress: Progress) -> TrainState | None:
    """The newest state that is whole; None where a run has none yet.

    Damaged checkpoints behind it are removed: the run makes them again.
    """
    _remove_leftovers(run)
    folder = run / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    for name in sorted(filter(_NAME.fullmatch, names), reverse=True):
        path = folder / name
        if (path / RECORD_NAME).exists() and not (path / _STATE_NAME).exists():
            progress.note(f"{path} is a head without a state. Looking at the one before it.")
            continue
        try:
            return _load(path)
        except ArtifactError as error:
            progress.note(f"{error} Going on from the checkpoint before it.")
            shutil.rmtree(path, ignore_errors=True)
    return None


def prune_checkpoints(run: Path, keep: int, *, step: int) -> None:
    """Leave the newest and the best ones; older ones that stay are heads without a state.

    `step` is that of the checkpoint just written. Behind it may lie heads from before the run had
    to begin anew, which are none of the newest.
    """
    records = [record for record in list_checkpoints(run) if record.step <= step]
    for record in records[:-_NUM_RESUMABLE]:
        (record.directory / _STATE_NAME).unlink(missing_ok=True)
    if not keep:
        return
    best = best_checkpoint(records)
    for record in records[: -max(keep, _NUM_RESUMABLE)]:
        if record is not best:
            shutil.rmtree(record.directory, ignore_errors=True)


def best_checkpoint(records: list[Record]) -> Record | None:
    """The one with the highest score; the newest if none has any.

    Among equals the one that promises more: a few prompts cannot tell weak heads apart. Then the
    earliest.
    """
    scored = [record for record in records if record.score is not None]
    if not scored:
        return records[-1] if records else None

    def rank(record: Record) -> tuple[float, float, int]:
        promised = record.measures.get("ideal_speed_up")
        return record.score or 0.0, promised or 0.0, -record.step

    return max(scored, key=rank)


def _state_tensors(state: TrainState) -> dict[str, Tensor]:
    tensors = {
        f"{kind}.{name}": tensor
        for name, kinds in state.moments.items()
        for kind, tensor in kinds.items()
    }
    if state.average is not None:
        # The head holds the average, so the weights need a place of their own.
        tensors |= {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _load(path: Path) -> TrainState:
    record = _read_record(path)
    if record is None:
        raise ArtifactError(f"{path / RECORD_NAME} is damaged or missing.")
    for name, entry in record.files.items():
        file = path / name
        if not file.is_file():
            raise ArtifactError(f"{file} is missing.")
        if _entry(file) != entry:
            raise ArtifactError(f"{file} is damaged: its checksum is not the one it was made with.")
    shown = dict(load_head(path).state_dict())
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(path / _STATE_NAME).items():
        kind, _, weight = name.partition(".")
        if kind == "weights":
            weights[weight] = tensor
        else:
            moments.setdefault(weight, {})[kind] = tensor
    return TrainState(
        step=record.step,
        tokens=record.tokens,
        weights=weights or shown,
        moments=moments,
        average=shown if weights else None,
        measures=record.measures,
        is_over=record.is_over,
    )


def _read_record(path: Path) -> Record | None:
    try:
        table = json.loads((path / RECORD_NAME).read_bytes())
        return Record(
            path,
            table["step"],
            table["tokens"],
            table["measures"],
            table["files"],
            table.get("is_over", False),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _entry(file: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "xxh3_128": digest.hexdigest()}


def _remove_leftovers(run: Path) -> None:
    """What a killed run was writing; the caller alone writes here."""
    folder = run / CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
