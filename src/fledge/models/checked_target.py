"""A target that is loaded to be read, compared with transformers' own word on it first."""

from pathlib import Path

import torch

from fledge.contracts.progress import Progress
from fledge.models.self_check import TESTED_MODEL_TYPES, check_reading, check_same_as_transformers
from fledge.models.target import Target


def load_checked_target(
    name: str,
    directory: Path,
    *,
    origin: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Target:
    """`origin` says where the target came from, for the note."""
    precision = str(dtype).removeprefix("torch.")
    progress.note(f"{name}: {origin}; running in {precision} on {device}")
    with progress.task(f"loading {name}", unit=""):
        target = Target.load(directory, dtype=dtype, device=device)
        if target.config.model_type not in TESTED_MODEL_TYPES:
            check_same_as_transformers(target)
        check_reading(target)
    if target.why_plain is not None:
        progress.note(f"{name} runs on transformers' layers: {target.why_plain}")
    return target
