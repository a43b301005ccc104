"""Several processes on one run, started by torchrun: DDP, or FSDP2 that shares out the state.

Each process works on its own micro-batches of a step; gradients are summed, since losses are
divided by what the whole step has. Rank 0 writes. States are gathered whole, so that a run may go
on with another number of processes, or with the other way of sharing.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fledge.contracts.errors import ConfigError
from fledge.contracts.train_settings import Parallel

T = TypeVar("T")

_PATIENCE = timedelta(minutes=30)
"""One process measures or writes while the others wait."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of a run."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of some work."""
        return list(items[self.rank :: self.count])

    def sum(self, tensor: Tensor) -> Tensor:
        """Summed over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def gather(self, thing: T) -> list[T]:
        """What every process has, in the order of ranks; for small things."""
        if self.count == 1:
            return [thing]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, thing)
        return found


@contextmanager
def joined_processes(device: torch.device) -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Processes(device=device)
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local} of this machine has no GPU of its own: there are "
                f"{torch.cuda.device_count()}; lower --nproc-per-node."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield Processes(rank, count, device)
    finally:
        dist.destroy_process_group()


def wrap(module: nn.Module, processes: Processes, parallel: Parallel) -> nn.Module:
    """The module as all processes run it together; FSDP2 changes it in place."""
    if processes.count == 1:
        return module
    if parallel == "ddp":
        return DistributedDataParallel(
            module, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    # One group: a head is small, and its forward reaches into all of its parts.
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


def accumulating(module: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
    """Around a forward and backward pass: processes sum gradients after the last one only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        return nullcontext()
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all processes; each of them has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; rows are shared out, columns are not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: Tensor, content: Tensor) -> None:
    """Copy whole content into a tensor, or into this process's part of it."""
    if isinstance(tensor, DTensor):
        placed = content.to(device=tensor.device, dtype=tensor.dtype)
        tensor.copy_(distribute_tensor(placed, tensor.device_mesh, tensor.placements))
    else:
        tensor.copy_(content)
