"""A micro-batch learned: forward and backward, gradients added to those of the weights.

On a GPU, the host takes two or three times as long to launch the many small kernels of a small head
as the GPU to run them. So where one process trains alone, passes are captured, one graph for each
size of micro-batch, and replayed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from fledge.engine.graphs import Graphs
from fledge.ops.document_flash import can_be_fused
from fledge.ops.micro_batch import MicroBatch
from fledge.training.distributed import Processes, accumulating
from fledge.training.fixed_batches import FixedMemory, SizedBatch, sized
from fledge.training.step_sums import unpacked
from fledge.training.ttt import TTTModule, TTTResult

_ROOM = 2.0
"""Passes that there has to be memory for: a launched one, and a captured one beside it."""


class Passes(Protocol):
    """How micro-batches are learned."""

    def learn(
        self,
        batch: MicroBatch,
        denominators_K: Tensor,
        generator: torch.Generator | None,
        *,
        is_last: bool,
    ) -> TTTResult:
        """Loss and sums; `is_last` of the micro-batches of a step."""


class LaunchedPasses:
    """Operation by operation, by any number of processes."""

    def __init__(self, module: nn.Module, processes: Processes) -> None:
        self._module, self._processes = module, processes

    def learn(
        self,
        batch: MicroBatch,
        denominators_K: Tensor,
        generator: torch.Generator | None,
        *,
        is_last: bool,
    ) -> TTTResult:
        with accumulating(self._module, is_last=is_last):
            result: TTTResult = self._module(batch, denominators_K, generator)
            # Processes average their gradients, and the loss is divided already.
            torch.autograd.backward(result.loss * self._processes.count)
        return TTTResult(result.loss.detach(), result.sums)


def can_be_captured(module: TTTModule) -> bool:
    """Whether the device itself looks up where documents lie; elsewhere the host does."""
    head = module.head
    device = head.draft_to_target_V.device
    return can_be_fused(device, module.compute_dtype, head.config.head_dim)


class CapturedPasses:
    """Replayed, by one process; the weights' gradients have memory that stays."""

    def __init__(self, module: TTTModule, graphs: Graphs, *, longest: int) -> None:
        """No sample is longer than `longest`."""
        self._module, self._graphs, self._longest = module, graphs, longest
        self._weights = [one for one in module.parameters() if one.requires_grad]
        assert not graphs.is_capturing or can_be_captured(module)
        self._memory = FixedMemory()
        self._pass_bytes: dict[int, int] = {}
        self._with_room: set[int] = set()

    def _has_room(self, num_steps: int) -> bool:
        """Graphs keep memory for a pass, beside that of passes that are launched.

        Passes with more draft steps take more: those with as many as these are judged by the first.
        """
        if num_steps in self._with_room or num_steps not in self._pass_bytes:
            return True
        torch.cuda.empty_cache()  # what is kept for launched passes cannot be captured
        free, _ = torch.cuda.mem_get_info(self._weights[0].device)
        if free <= _ROOM * self._pass_bytes[num_steps]:
            return False
        self._with_room.add(num_steps)
        return True

    @contextmanager
    def _measured(self, num_steps: int) -> Iterator[None]:
        """What the first pass with so many draft steps takes."""
        if num_steps in self._pass_bytes:
            yield
            return
        device = self._weights[0].device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        self._pass_bytes[num_steps] = torch.cuda.max_memory_allocated(device) - before

    def _give_up(self) -> None:
        """From here on passes are launched, and need the memory of those that were captured."""
        self._graphs.is_capturing = False
        self._graphs.clear()
        self._memory = FixedMemory()

    def learn(
        self,
        batch: MicroBatch,
        denominators_K: Tensor,
        generator: torch.Generator | None,
        *,
        is_last: bool,
    ) -> TTTResult:
        assert generator is None, "captured passes draw no noise"
        del is_last
        given = sized(batch, denominators_K, longest=self._longest)
        num_steps = len(denominators_K)
        if not self._graphs.is_capturing or not self._has_room(num_steps):
            self._give_up()
            loss, sums_SK = self._learn(given)
            return TTTResult(loss, unpacked(sums_SK))
        own = self._memory.fill(given)
        with self._measured(num_steps):
            (loss, sums_SK), _ = self._graphs.run(own.size, lambda: self._learn(own))
        # The next replay writes to the same place.
        return TTTResult(loss.clone(), unpacked(sums_SK.clone()))

    def _learn(self, own: SizedBatch) -> tuple[Tensor, Tensor]:
        result: TTTResult = self._module(own.batch, own.denominators_K, suffixes=own.suffixes)
        gradients = torch.autograd.grad(result.loss, self._weights)
        with torch.no_grad():
            for weight, gradient in zip(self._weights, gradients, strict=True):
                assert weight.grad is not None, "the optimizer keeps memory for them"
                weight.grad += gradient
        return result.loss.detach(), result.sums.packed()
