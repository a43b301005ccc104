"""Work on rows in several processes.

Batches come back in their order, with at most a few of them in memory, so the result does not
depend on how many processes there are.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Any, Generic, TypeVar

from fledge.contracts.errors import CapacityError

_BATCHES_AHEAD = 3
"""Of each process, so that none waits for the one that reads."""

Given = TypeVar("Given")
Made = TypeVar("Made")


def batches_of(rows: Iterable[Given], size: int) -> Iterator[list[Given]]:
    """The rows in their order, so many at a time."""
    unread = iter(rows)
    while batch := list(islice(unread, size)):
        yield batch


class WorkerPool(Generic[Given, Made]):
    """Processes that turn batches into results; they start with the first batch."""

    def __init__(
        self,
        num_workers: int,
        what: str,
        make: Callable[..., Callable[[list[Given]], list[Made]]],
        *given: Any,
    ) -> None:
        """Each process calls `make(*given)` once, and what that returns for every batch.

        `what` says in an error what the processes do.
        """
        self._num_workers, self._what = num_workers, what
        self._make, self._given = make, given
        self._pool: ProcessPoolExecutor | None = None

    def map(self, batches: Iterable[list[Given]]) -> Iterator[list[Made]]:
        """What the processes make of the batches, in their order."""
        try:
            yield from self._map(iter(batches))
        except BrokenProcessPool as error:
            raise CapacityError(
                f"a process that {self._what} has died, probably for want of memory; run the same "
                f"command again with fewer than {self._num_workers} workers. It goes on where it "
                "stopped."
            ) from error

    def _map(self, unread: Iterator[list[Given]]) -> Iterator[list[Made]]:
        waiting: deque[Future[list[Made]]] = deque()
        while True:
            while len(waiting) < self._num_workers * _BATCHES_AHEAD:
                batch = next(unread, None)
                if batch is None:
                    break
                waiting.append(self._submit(batch))
            if not waiting:
                return
            yield waiting.popleft().result()

    def _submit(self, batch: list[Given]) -> Future[list[Made]]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_workers,
                # A fork would copy a target that is at work here, threads and all.
                get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._make, *self._given),
            )
        return self._pool.submit(_work_on, batch)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_work: Callable[[list[Any]], list[Any]] | None = None
"""Of this process, if it is a worker."""


def _start_worker(make: Callable[..., Callable[[list[Any]], list[Any]]], *given: Any) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _work = make(*given)


def _leave_with_parent() -> None:
    """A parent that was killed cannot say so, and a worker would wait for rows forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work_on(batch: list[Any]) -> list[Any]:
    assert _work is not None, "the worker was not started"
    return _work(batch)
