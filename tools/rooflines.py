"""The least time that a decoding cycle can take on this device, by the bytes it has to read.

    bytes       target weights + cache of every request + the head's fusing matrix
                + head steps x (other head weights + its entries of every request)
    operations  2 x weights x rows of a pass, attention left out
    floor       the larger of bytes / bandwidth and operations / rate

Bandwidth is that of a copy, bytes read and bytes written counted; the rate is that of a square
matrix product. Both are measured when they are asked for.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measured_engines import PLAIN, Subject, tree_of, wait

from fledge.engine.memory import probe_bytes_per_slot

FORMULA = (
    "max(bytes / copied_bytes_per_s, operations / product_operations_per_s); bytes = target weights"
    " without looked up rows + cache of every request + fusing matrix of the head + head steps x"
    " (its other weights + its entries of every request); operations = 2 x weights x rows"
)
_COPIED_BYTES = 4 << 30


class Limits:
    """What the device can do, measured now: a copy counts bytes read and bytes written."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        is_cuda = device.type == "cuda"
        count = (_COPIED_BYTES if is_cuda else 1 << 24) // dtype.itemsize
        source = torch.randn(count, device=device, dtype=dtype)
        goal = torch.empty_like(source)
        seconds = _median_s(lambda: goal.copy_(source), device)
        self.bytes_per_s = 2 * count * dtype.itemsize / seconds
        side = 8192 if is_cuda else 256
        left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        self.operations_per_s = 2 * side**3 / _median_s(lambda: left @ right, device)

    def as_json(self) -> dict[str, float]:
        return {
            "copied_bytes_per_s": self.bytes_per_s,
            "product_operations_per_s": self.operations_per_s,
        }


def weight_bytes(subject: Subject) -> int:
    """What a target pass reads of its weights: all but rows of an embedding looked up."""
    target = subject.target
    total = sum(p.numel() * p.element_size() for p in target._model.parameters())
    matrix = target.embedding.weight
    is_tied = target.lm_head_weight_VD.data_ptr() == matrix.data_ptr()
    return total - (0 if is_tied else matrix.numel() * matrix.element_size())


def cache_bytes(subject: Subject, num_tokens: int) -> int:
    """What a pass reads of a request's cache."""
    return sum(
        size * (num_tokens if window is None else min(num_tokens, window))
        for window, size in probe_bytes_per_slot(subject.target).items()
    )


def head_bytes(subject: Subject, num_tokens: int) -> tuple[int, int, int]:
    """What a cycle reads once of a head; what each step reads of weights and of a request."""
    assert subject.head is not None
    config, size = subject.head.config, subject.target.embedding.weight.element_size()
    fusing = sum(p.numel() * size for p in subject.head.fc.parameters())
    weights = sum(p.numel() * size for p in subject.head.parameters()) - fusing
    return fusing, weights, 2 * config.num_kv_heads * config.head_dim * size * num_tokens


def floor(subject: Subject, way: str, size: int, num_tokens: int, limits: Limits) -> dict[str, Any]:
    """The least seconds of a cycle of `size` requests of so many tokens."""
    moved = weight_bytes(subject) + size * cache_bytes(subject, num_tokens)
    rows = size
    per_weight, operations = subject.target.dtype.itemsize, 0.0
    if way != PLAIN:
        tree = tree_of(way)
        fusing, weights, entries = head_bytes(subject, num_tokens)
        moved += fusing + tree.depth * (weights + size * entries)
        operations += 2 * weights / per_weight * size * (1 + (tree.depth - 1) * tree.width)
        rows += size * tree.num_nodes
    operations += 2 * weight_bytes(subject) / per_weight * rows
    seconds = max(moved / limits.bytes_per_s, operations / limits.operations_per_s)
    return {"bytes": moved, "operations": operations, "rows": rows, "floor_s": seconds}


def _median_s(work: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    seconds = []
    for _ in range(rounds):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])
