"""What can be said about a row without knowing the others: the costly part of filtering.

It may be done by several processes at once; rows come back in their order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple, Protocol

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrepareSettings
from fledge.contracts.progress import Progress, SilentProgress
from fledge.data.decontaminate import Decontaminator
from fledge.data.duplicates import Trace, Tracer
from fledge.data.privacy import Scrubber
from fledge.data.variants import make_variants
from fledge.data.worker_pool import WorkerPool, batches_of

_BATCH_ROWS = 64

Numbered = tuple[int, Conversation]


class Examined(NamedTuple):
    """All that the filters need to know of a row, or of a variant of one."""

    kept: Conversation | None
    """As it may be kept; None when privacy drops it, and nothing else is known then."""

    found: Counter[str]
    """Personal and financial identifiers, by type."""

    trace: Trace | None
    benchmark: str | None


class ExaminedRow(NamedTuple):
    """What became of a row that was read."""

    number: int
    outcomes: list[Examined]
    """One, or one for each of its variants."""


class Examiner:
    """The filters that look at one row alone."""

    def __init__(self, settings: PrepareSettings, progress: Progress) -> None:
        self._seed = settings.seed
        self._variants = {source.name: source.variants for source in settings.sources}
        self._tracer = Tracer(settings.duplicates)
        self._scrubber = Scrubber(settings.privacy)
        self._decontaminator: Decontaminator | None = None
        if settings.decontaminate.against:
            self._decontaminator = Decontaminator(settings.decontaminate, progress)

    def examine(self, numbered: Numbered) -> ExaminedRow:
        number, row = numbered
        count = self._variants.get(row.origin.source, 0)
        if not count:
            return ExaminedRow(number, [self._examine(row)])
        variants = make_variants(row, count, self._seed)
        # Other numbers would hide what a row has in common with a benchmark.
        benchmark = self._benchmark(row) if variants else None
        return ExaminedRow(number, [self._examine(one, benchmark) for one in variants])

    def _examine(self, row: Conversation, benchmark: str | None = None) -> Examined:
        scrubbed = self._scrubber.scrub(row)
        kept, found = scrubbed.conversation, scrubbed.found
        if kept is None:
            return Examined(None, found, None, None)
        # Benchmarks are compared with the row as it was read: a placeholder would hide a match.
        return Examined(kept, found, self._tracer.trace(kept), benchmark or self._benchmark(row))

    def _benchmark(self, row: Conversation) -> str | None:
        return None if self._decontaminator is None else self._decontaminator.overlap(row)


class Examination(Protocol):
    """Whoever examines rows."""

    def examine(self, rows: Iterable[Numbered]) -> Iterator[ExaminedRow]:
        """The rows in their order, with what was found out."""

    def close(self) -> None: ...


def open_examination(
    settings: PrepareSettings, num_workers: int, progress: Progress
) -> Examination:
    """In this process, or in several others."""
    if num_workers > 1:
        return _OtherProcesses(settings, num_workers)
    return _ThisProcess(Examiner(settings, progress))


class _ThisProcess:
    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner

    def examine(self, rows: Iterable[Numbered]) -> Iterator[ExaminedRow]:
        return map(self._examiner.examine, rows)

    def close(self) -> None:
        pass


class _OtherProcesses:
    """Processes that examine rows; they start with the first row."""

    def __init__(self, settings: PrepareSettings, num_workers: int) -> None:
        self._pool: WorkerPool[Numbered, ExaminedRow] = WorkerPool(
            num_workers, "filters rows", _make_examiner, settings
        )

    def examine(self, rows: Iterable[Numbered]) -> Iterator[ExaminedRow]:
        return chain.from_iterable(self._pool.map(batches_of(rows, _BATCH_ROWS)))

    def close(self) -> None:
        self._pool.close()


def _make_examiner(settings: PrepareSettings) -> Callable[[list[Numbered]], list[ExaminedRow]]:
    examiner = Examiner(settings, SilentProgress())
    return lambda rows: [examiner.examine(row) for row in rows]
