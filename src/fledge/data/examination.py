"""What can be said about a row without knowing the others: the costly part of filtering.

It may be done by several processes at once; rows come back in their order, with at most a few
batches in memory, so the result does not depend on how many processes there are.
"""

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import NamedTuple, Protocol

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrepareSettings
from fledge.contracts.errors import CapacityError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.data.decontaminate import Decontaminator
from fledge.data.duplicates import Trace, Tracer
from fledge.data.privacy import Scrubber
from fledge.data.variants import make_variants

_BATCH_ROWS = 64
_BATCHES_AHEAD = 3
"""Of each process, so that none waits for the one that reads."""


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
        return _WorkerPool(settings, num_workers)
    return _ThisProcess(Examiner(settings, progress))


class _ThisProcess:
    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner

    def examine(self, rows: Iterable[Numbered]) -> Iterator[ExaminedRow]:
        return map(self._examiner.examine, rows)

    def close(self) -> None:
        pass


class _WorkerPool:
    """Processes that examine rows; they start with the first row."""

    def __init__(self, settings: PrepareSettings, num_workers: int) -> None:
        self._settings = settings
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def examine(self, rows: Iterable[Numbered]) -> Iterator[ExaminedRow]:
        try:
            yield from self._examine(iter(rows))
        except BrokenProcessPool as error:
            raise CapacityError(
                "a process that filters rows has died, probably for want of memory; run the same "
                f"command again with fewer than {self._num_workers} workers. It goes on where it "
                "stopped."
            ) from error

    def _examine(self, unread: Iterator[Numbered]) -> Iterator[ExaminedRow]:
        waiting: deque[Future[list[ExaminedRow]]] = deque()
        while True:
            while len(waiting) < self._num_workers * _BATCHES_AHEAD:
                batch = list(islice(unread, _BATCH_ROWS))
                if not batch:
                    break
                waiting.append(self._submit(batch))
            if not waiting:
                return
            yield from waiting.popleft().result()

    def _submit(self, rows: list[Numbered]) -> Future[list[ExaminedRow]]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_workers,
                # A fork would copy a target that is at work here, threads and all.
                get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._settings,),
            )
        return self._pool.submit(_examine_batch, rows)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_examiner: Examiner | None = None
"""Of this process, if it is a worker."""


def _start_worker(settings: PrepareSettings) -> None:
    global _examiner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _examiner = Examiner(settings, SilentProgress())


def _leave_with_parent() -> None:
    """A parent that was killed cannot say so, and a worker would wait for rows forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _examine_batch(rows: list[Numbered]) -> list[ExaminedRow]:
    assert _examiner is not None, "the worker was not started"
    return [_examiner.examine(row) for row in rows]
