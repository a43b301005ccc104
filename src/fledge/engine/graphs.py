"""Work on the device that is captured once and replayed: one launch instead of thousands.

The first run of a kind is an ordinary one: it compiles kernels and lets libraries allocate what
they keep. The second is captured, and replayed from then on. All graphs share their memory for
intermediate results, since they run one after the other. On a CPU every run is an ordinary one.
"""

import logging
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

import torch

from fledge.contracts.errors import CapacityError
from fledge.ops.kernel_choice import uses_kernels

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_MOST_GRAPHS = 512
"""Graphs that are kept; the one not used for longest goes first. One that the device still runs may
go too: the driver frees it when it is done, and its memory is written by later work alone."""

_MOST_SEEN = 4 * _MOST_GRAPHS
"""Kinds that are known to have run once; a kind that is forgotten runs piece by piece again."""

_LIKELY_LAUNCH_S = 0.02
"""What launching a pass piece by piece takes before any was seen."""

_FEW_FREE = 0.05
"""Share of the device's memory below which what is set free is given back before a capture."""


_idle_streams: defaultdict[torch.device, list[Any]] = defaultdict(list)
"""Of graphs that are gone. Libraries keep memory for every stream that ever captured their work, so
that new ones for each engine would let a process grow; two that live never share one."""


class _Captured(Generic[Result]):
    """A graph, and the tensors that hold its results after every replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Result, number: int) -> None:
        self.graph, self.result, self.number = graph, result, number


@dataclass(slots=True)
class GraphCounts:
    """How work was run where it can be captured."""

    replayed: int = 0
    launched: int = 0
    """Piece by piece."""

    captured: int = 0
    cold_s: float = 0.0
    """What the host spent on launching piece by piece and on capturing."""


class Graphs:
    """Runs of different kinds on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_capturing = device.type == "cuda"
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _Captured[Any]] = OrderedDict()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._num_captured = 0
        self._costs_s: deque[float] = deque(maxlen=64)
        self.counts = GraphCounts()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def num_cold(self) -> int:
        """Runs that were no replays, and took longer than those that follow."""
        return self.counts.launched + self.counts.captured

    @property
    def launch_s(self) -> float:
        """What the host takes to launch a pass piece by piece, or to capture it."""
        return median(self._costs_s) if self._costs_s else _LIKELY_LAUNCH_S

    @property
    def cost_s(self) -> float:
        """What one more graph costs: an ordinary run, and the capture."""
        return 2.0 * self.launch_s

    def forget_counts(self) -> None:
        """Count from here on."""
        self.counts = GraphCounts()

    @property
    def most(self) -> int:
        """Graphs that are kept."""
        return _MOST_GRAPHS

    def number_of(self, kind: Hashable) -> int | None:
        """Of the graph that runs of a kind replay; None while there is none."""
        found = self._graphs.get(kind)
        return None if found is None else found.number

    def run(
        self,
        kind: Hashable,
        work: Callable[[], Result],
        *,
        seen_as: Hashable | None = None,
        is_pass: bool = True,
    ) -> tuple[Result, int | None]:
        """Do the work; runs of one kind must read and write the same tensors.

        Beside the result comes the number of the graph that holds it: its tensors are the same
        after every run with that number. None for a result of its own. Work that `launch` has done
        under the name `seen_as` need not run piece by piece again. Work that is no pass of a model
        says nothing of what launching one takes.
        """
        found = self._graphs.get(kind)
        if found is None:
            if not self.is_capturing:
                return work(), None
            name = kind if seen_as is None else seen_as
            if name not in self._seen:
                return self.launch(name, work, is_pass=is_pass), None
            self._seen.move_to_end(name)
            started = time.perf_counter()
            found = self._try_to_capture(work)
            self._spent(started, is_pass)
            if found is None:
                self.counts.launched += 1
                return work(), None
            self.counts.captured += 1
            self._graphs[kind] = found
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(kind)
        self.counts.replayed += 1
        found.graph.replay()
        return found.result, found.number

    def launch(self, name: Hashable, work: Callable[[], Result], *, is_pass: bool = True) -> Result:
        """Do work piece by piece, and remember that kernels of its kind have run."""
        if not self.is_capturing:
            return work()
        self.counts.launched += 1
        started = time.perf_counter()
        result = work()
        self._spent(started, is_pass)
        self._seen[name] = None  # only now: a run that was cut short has prepared nothing
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return result

    def _spent(self, started: float, is_pass: bool) -> None:
        seconds = time.perf_counter() - started
        if is_pass:
            self._costs_s.append(seconds)
        self.counts.cold_s += seconds

    def _try_to_capture(self, work: Callable[[], Result]) -> _Captured[Result] | None:
        """None where the work asks the device something on its way; it is not tried again."""
        try:
            return self._capture(work)
        except (RuntimeError, NotImplementedError, CapacityError) as error:
            self.is_capturing = False
            torch.cuda.synchronize(self._device)
            _log.warning(
                "work cannot be captured here (%s: %s); what was not captured before is launched "
                "piece by piece and waits for the host",
                type(error).__name__,
                (str(error).strip().splitlines() or ["no reason given"])[0],
            )
            return None

    def _capture(self, work: Callable[[], Result]) -> _Captured[Result]:
        """Not through `torch.cuda.graph`, which waits for the device and gives all free memory back
        before each capture: requests would wait for both, and for the memory to be had again."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                if self._stream is None:
                    self._stream = self._own_stream()
                    self._prepare(self._stream)
            free, total = torch.cuda.mem_get_info(self._device)
            if free < _FEW_FREE * total:
                torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                # Other threads may ask the device for other things meanwhile: another engine, a
                # training.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        self._num_captured += 1
        return _Captured(graph, result, self._num_captured)

    def _prepare(self, stream: torch.cuda.Stream) -> None:
        """Make what kernels share on a stream: made in a capture, every launch would zero it."""
        if uses_kernels(torch.empty(0, device=self._device)):
            from fledge.ops.paged_segments_triton import counts_for

            with torch.cuda.stream(stream):
                counts_for(self._device)
            stream.synchronize()  # graphs run on other streams

    def _own_stream(self) -> torch.cuda.Stream:
        """To capture on, until this is garbage: then whoever comes next has it."""
        idle = _idle_streams[self._device]
        new_stream: Any = torch.cuda.Stream
        stream: torch.cuda.Stream = idle.pop() if idle else new_stream()
        weakref.finalize(self, idle.append, stream)
        return stream

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None
