"""Work on the device that is captured once and replayed: one launch instead of thousands.

The first run of a kind is an ordinary one: it compiles kernels and lets libraries allocate what
they keep. The second is captured, and replayed from then on. All graphs share their memory for
intermediate results, since they run one after the other. On a CPU every run is an ordinary one.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from fledge.contracts.errors import CapacityError

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_MOST_GRAPHS = 256
"""Graphs that are kept; the one not used for longest goes first. One that the device still runs may
go too: the driver frees it when it is done, and its memory is written by later work alone."""

_MOST_SEEN = 4 * _MOST_GRAPHS
"""Kinds that are known to have run once; a kind that is forgotten runs piece by piece again."""


class _Captured(Generic[Result]):
    """A graph, and the tensors that hold its results after every replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Result, number: int) -> None:
        self.graph, self.result, self.number = graph, result, number


class Graphs:
    """Runs of different kinds on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_capturing = device.type == "cuda"
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _Captured[Any]] = OrderedDict()
        self._pool: Any = None
        self._num_captured = 0
        self.num_cold = 0
        """Runs that were no replays, and took longer than those that follow."""

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def most(self) -> int:
        """Graphs that are kept."""
        return _MOST_GRAPHS

    def run(self, kind: Hashable, work: Callable[[], Result]) -> tuple[Result, int | None]:
        """Do the work; runs of one kind must read and write the same tensors.

        Beside the result comes the number of the graph that holds it: its tensors are the same
        after every run with that number. None for a result of its own.
        """
        found = self._graphs.get(kind)
        if found is None:
            if not self.is_capturing:
                return work(), None
            self.num_cold += 1
            if kind not in self._seen:
                result = work()
                self._seen[kind] = None  # only now: a run that was cut short has prepared nothing
                if len(self._seen) > _MOST_SEEN:
                    self._seen.popitem(last=False)
                return result, None
            self._seen.move_to_end(kind)
            found = self._try_to_capture(work)
            if found is None:
                return work(), None
            self._graphs[kind] = found
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(kind)
        found.graph.replay()
        return found.result, found.number

    def _try_to_capture(self, work: Callable[[], Result]) -> _Captured[Result] | None:
        """None where the work asks the device something on its way; it is not tried again."""
        try:
            return self._capture(work)
        except (RuntimeError, NotImplementedError, CapacityError) as error:
            self.is_capturing = False
            torch.cuda.synchronize(self._device)
            _log.warning(
                "cycles cannot be captured here (%s: %s); those that were not captured before are "
                "launched piece by piece and wait for the host",
                type(error).__name__,
                (str(error).strip().splitlines() or ["no reason given"])[0],
            )
            return None

    def _capture(self, work: Callable[[], Result]) -> _Captured[Result]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the device for other things meanwhile: another engine, a training.
        captured = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), captured:
            result = work()
        self._num_captured += 1
        return _Captured(graph, result, self._num_captured)

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None
