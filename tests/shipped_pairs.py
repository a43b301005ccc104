"""A tiny target, and a head that comes with it as if the package held it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.contracts.progress import SilentProgress
from fledge.lab.head_card import Evidence
from fledge.lab.shipping import ship_head
from fledge.models import shipped_heads
from fledge.models.head_files import save_head
from fledge.models.shipped_heads import ShippedHead
from fledge.models.target import Target
from fledge.models.weights_identity import weights_identity
from fledge.store.manifest import HEAD, Manifest, Plan
from fledge.testing import tiny_head


def training_manifest(target: Path, *, weights: str | None = None) -> Manifest:
    """What `fledge train` would have written for this target."""
    return Manifest(
        plan=Plan(
            kind=HEAD,
            settings={
                "epochs": 2,
                "batch_tokens": 512,
                "seed": 0,
                "loss": {"kind": "soft_cross_entropy", "steps": 7, "step_decay": 0.8},
                "optimizer": {"learning_rate": 1e-3},
            },
            identity={"target": target.name, "weights": weights or weights_identity(target)},
        ),
        counts={
            "steps": 28,
            "best_step": 14,
            "tokens": 14_336,
            "weights": 30_000,
            "best": {"accept_length": 1.25},
        },
        files={},
        provenance={"command": "fledge train", "device": "cpu", "date": "2026-11-15 12:00 UTC"},
    )


def tuning(head: str, weights: str, **changed: Any) -> dict[str, Any]:
    """What `fledge tune` would have written for a head with this fingerprint."""
    row = {
        "depth": 3,
        "width": 2,
        "budget": 5,
        "controller": "fixed",
        "speedup": 1.5,
        "ci": [1.25, 1.75],
        "accept_length": 2.0,
        "state": "final",
    }
    lost = {**row, "depth": 7, "speedup": 1.0, "state": "tried"}
    return {
        "schema": 1,
        "state": "finished",
        "head": "/somewhere/run/checkpoints/step-14",
        "target": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "made_for": {"head": head, "weights": weights},
        "concurrency": 1,
        "best": row,
        "chain": None,
        "rows": [row, lost],
        "provenance": {"command": "fledge tune", "device": "cpu", "date": "2026-11-15 12:00 UTC"},
        **changed,
    }


def save_random_head(target: Path, directory: Path, **flags: Any) -> Path:
    loaded = Target.load(target, dtype=torch.float32, device=torch.device("cpu"))
    save_head(tiny_head(loaded, **flags), directory)
    return directory


def ship(head: Path, target: Path, root: Path, **evidence: Any) -> ShippedHead:
    """The head of a directory as if it came with fledge."""
    given = Evidence(**{"training": training_manifest(target), **evidence})
    return ship_head(
        head, given, target=str(target), root=root, licence="MIT", progress=SilentProgress()
    )


@contextmanager
def shipped_from(root: Path) -> Iterator[None]:
    """Heads are looked for in this directory instead of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped_heads, "SHIPPED_HEADS", root)
        yield
