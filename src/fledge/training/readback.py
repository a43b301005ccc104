"""Figures of a step on their way to the host, read when they have arrived.

Reading a number from a GPU waits for everything before it. A step's figures are therefore copied
while the next step is already being prepared, and read one step late; on a CPU there is nothing to
wait for, and they are read at once.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.training.step_sums import StepSums, unpacked


class StepFigures(NamedTuple):
    """What the device says about one step."""

    step: int
    """Counted from 1."""

    loss: float
    norm: float
    sums: StepSums
    micro_losses: list[float]
    """Of this process's micro-batches."""


@dataclass(slots=True)
class _Waiting:
    step: int
    shared: Tensor
    own: Tensor
    event: torch.Event | None


@dataclass(slots=True)
class LateReader:
    """Keeps figures until they may be read without waiting."""

    num_steps: int
    """Draft steps that the sums have."""

    device: torch.device
    _waiting: deque[_Waiting] = field(default_factory=deque)

    @property
    def lag(self) -> int:
        """Steps that may be under way while older ones are read."""
        return 1 if self.device.type == "cuda" else 0

    def push(self, step: int, shared: Tensor, own: Tensor) -> None:
        """`shared`: norm, loss and sums of all processes; `own`: our micro-batches' losses."""
        event = None
        if self.device.type == "cuda":
            shared, own = _to_host(shared), _to_host(own)
            event = torch.Event(self.device)
            event.record()
        self._waiting.append(_Waiting(step, shared, own, event))

    def ready(self) -> list[StepFigures]:
        """Figures of steps that lie far enough behind."""
        return [self._read() for _ in range(len(self._waiting) - self.lag)]

    def all(self) -> list[StepFigures]:
        """Every figure there is; waits for the device."""
        return [self._read() for _ in range(len(self._waiting))]

    def _read(self) -> StepFigures:
        waiting = self._waiting.popleft()
        if waiting.event is not None:
            waiting.event.synchronize()
        norm, loss = waiting.shared[:2].tolist()
        sums = unpacked(waiting.shared[2:].reshape(-1, self.num_steps))
        return StepFigures(waiting.step, loss, norm, sums, waiting.own.tolist())


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
