"""Cycles and passes over prompts captured before the first request, on places that nobody has.

A size that comes up for the first time is compiled and captured while its requests wait, a tenth of
a second to two. Here the largest comes first, so that all others find room in what it has set free,
then the small ones, which a server sees first.
"""

import time
from collections.abc import Callable, Iterator

import torch

from fledge.contracts.errors import CapacityError
from fledge.contracts.progress import Progress
from fledge.contracts.settings import EngineSettings
from fledge.engine.draft_plan import PLAIN, DraftPlan
from fledge.engine.graphs import Graphs
from fledge.engine.steady_batch import SIZES, Filters, batch_size
from fledge.engine.steady_places import SteadyPlaces
from fledge.engine.steady_plans import Plans
from fledge.engine.steady_reading import SteadyReader
from fledge.engine.steady_runs import SteadyRuns

_SAMPLINGS = tuple(
    Filters(can_sample=can_sample, largest_top_k=0, has_top_p=False, has_min_p=False)
    for can_sample in (False, True)
)
_LEAST_FREE = 0.03
"""Share of the device's memory that stays free."""

_RUNS = 2
"""The first run of a kind is an ordinary one, the second is captured."""

_MOST_ROWS = 1024
"""Of passes over prompts; the device takes longer for more than the host does to ask for them."""


class CapturesAhead:
    """What is captured, and in which order."""

    def __init__(
        self,
        parts: tuple[SteadyRuns, SteadyReader, SteadyPlaces, Graphs],
        settings: EngineSettings,
        wanted: Plans | None,
        *,
        device: torch.device,
        is_measured: bool,
    ) -> None:
        """`wanted` says what to draft, None for nothing; `is_measured` for a controller that asks
        for the gains of some cycles."""
        self._runs, self._reader, self._places, self._graphs = parts
        self._settings, self._device = settings, device
        self._wanted, self._is_measured = wanted, is_measured

    def run(self, progress: Progress, *, budget_s: float) -> int:
        """Capture for so long at most; returns how many graphs there are then."""
        until = time.perf_counter() + budget_s
        jobs = list(self._jobs())
        with progress.task("capturing cycles", total=len(jobs), unit="kinds") as task:
            for number, job in enumerate(jobs):
                why = self._why_stop(until)
                try:
                    for _ in range(_RUNS if why is None else 0):
                        job()
                except (torch.OutOfMemoryError, CapacityError):
                    why = "the device's memory is used up"
                if why is not None:
                    progress.note(
                        f"{number} of {len(jobs)} likely kinds of cycles were captured ahead: "
                        f"{why}. The others are when they first come up."
                    )
                    break
                task.advance(1)
        return len(self._graphs)

    def _why_stop(self, until: float) -> str | None:
        if time.perf_counter() >= until:
            return "the time for it is used up"
        if not self._graphs.is_capturing:
            return "what was tried last could not be captured"
        if len(self._graphs) >= self._graphs.most * 3 // 4:
            return "no more of them are kept"
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            if free < _LEAST_FREE * total:
                return "the device's memory is used up"
        return None

    def _jobs(self) -> Iterator[Callable[[], None]]:
        """Prompts first: what they leave is what drafting reads. Then cycles, all of it for greedy
        requests before sampled ones; prompts that a head does not read are last.
        """
        for filters in _SAMPLINGS:
            yield from self._readings(filters, with_head=self._wanted is not None)
            most = batch_size(self._settings.max_requests)
            for size in [most, *(size for size in SIZES if size < most)]:
                if self._wanted is not None:
                    yield self._bare_cycle(size, filters)
                for plan in (PLAIN, *(self._wanted(size) if self._wanted is not None else ())):
                    yield self._cycle(size, plan, filters)
        if self._wanted is not None:
            for filters in _SAMPLINGS:
                yield from self._readings(filters, with_head=False)
                yield from self._readings(filters, with_head=False, is_told=False)

    def _readings(
        self, filters: Filters, *, with_head: bool, is_told: bool = True
    ) -> Iterator[Callable[[], None]]:
        for num_rows in reversed(self._reader.sizes):
            if num_rows <= _MOST_ROWS:
                yield self._reading(num_rows, filters, with_head, is_told)

    def _reading(
        self, num_rows: int, filters: Filters, with_head: bool, is_told: bool
    ) -> Callable[[], None]:
        return lambda: self._reader.rehearse(
            num_rows, filters, with_head=with_head, is_told=is_told
        )

    def _bare_cycle(self, size: int, filters: Filters) -> Callable[[], None]:
        def run() -> None:
            batch = self._places.batch_of(size)
            batch.rehearse(filters)
            self._runs.verify_bare(batch, filters)
            batch.fill([])

        return run

    def _cycle(self, size: int, plan: DraftPlan, filters: Filters) -> Callable[[], None]:
        def run() -> None:
            batch = self._places.batch_of(size)
            batch.rehearse(filters)
            trees = None
            if not plan.is_plain:
                trees = self._runs.draft(batch, plan, filters)
                if self._is_measured:
                    self._runs.gains(trees)
            elif self._wanted is not None:
                self._runs.read_along(batch)
            self._runs.verify(batch, trees, filters)
            batch.fill([])

        return run
