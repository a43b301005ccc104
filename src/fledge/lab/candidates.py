"""Heads to choose among: single ones, and all checkpoints of training runs and sweeps."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fledge.contracts.errors import ArtifactError, FledgeError, MismatchError
from fledge.contracts.progress import Progress
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.target import Target
from fledge.store.hashing import hash_part
from fledge.store.local_directory import require_directory

_CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_STATE = "state.safetensors"
"""Of the optimizer; no part of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A head directory, under the name that results speak of it by."""

    name: str
    directory: Path


def find_candidates(paths: Sequence[Path]) -> list[Candidate]:
    """Every head once, in the order of the paths; a run's checkpoints by their steps."""
    found: dict[Path, Candidate] = {}
    for path in paths:
        for directory in _heads_below(path.expanduser()):
            candidate = Candidate(name=str(directory), directory=directory)
            found.setdefault(directory.resolve(), candidate)
    if not found:
        raise ArtifactError("no head was named; give directories of heads or training runs.")
    return list(found.values())


def is_head(path: Path) -> bool:
    return (path / _CONFIG).is_file()


def _heads_below(path: Path) -> list[Path]:
    require_directory(path, hint="; give a head or a training run")
    # A finished run is a head too, a copy of its best checkpoint: it would be measured twice.
    for pattern in ("checkpoints/step-*", "trials/*/run"):
        below = [one for one in sorted(path.glob(pattern)) if is_head(one)]
        if below:
            return below
    if is_head(path):
        return [path]
    raise ArtifactError(
        f"{path} holds neither a head ({_CONFIG} and weights) nor the checkpoints of a training "
        "run or a sweep."
    )


def fingerprints(candidates: Sequence[Candidate], progress: Progress) -> dict[str, str]:
    """By name; two heads with the same files have the same one."""
    files = {one.name: _files(one.directory) for one in candidates}
    total = sum(file.stat().st_size for found in files.values() for file in found)
    with progress.task("checking heads", total) as task:
        return {
            name: hashlib.sha256(
                "".join(f"{file.name} {hash_part(file, task)}\n" for file in found).encode()
            ).hexdigest()
            for name, found in files.items()
        }


def _files(directory: Path) -> list[Path]:
    weights = [file for pattern in _WEIGHTS for file in sorted(directory.glob(pattern))]
    return [directory / _CONFIG, *(file for file in weights if file.name != _STATE)]


def load_candidate(candidate: Candidate, target: Target) -> Eagle3Head:
    """The head beside its target; one of another target is refused by name."""
    try:
        return fit_to_target(load_head(candidate.directory), target)
    except MismatchError as error:
        raise MismatchError(
            f"{candidate.name} does not belong to this target: {error} Leave it out, or name its "
            "own target."
        ) from error
    except FledgeError as error:
        if candidate.name in str(error):
            raise
        raise type(error)(f"{candidate.name}: {error}") from error


def strange_weights(head: Eagle3Head) -> str | None:
    """The name of a tensor with something that is no number in it."""
    for name, tensor in head.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
