"""Threads that load what comes next, in order, and never hold more bytes than they may."""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from fledge.contracts.errors import ConfigError

Plan = TypeVar("Plan")
Loaded = TypeVar("Loaded")


def read_ahead(
    load: Callable[[Plan], Loaded],
    plans: Sequence[Plan],
    costs: Sequence[int],
    *,
    threads: int,
    max_bytes: int,
) -> Generator[Loaded, None, None]:
    """What `load` makes of each plan, in their order.

    Each costs so many bytes from before it is loaded until the next one is asked for. An error
    comes out where its plan's turn is.
    """
    largest = max(costs, default=0)
    if largest > max_bytes:
        raise ConfigError(
            f"max_bytes is {max_bytes}, and the largest batch takes {largest} bytes; raise it, or "
            "make batches of fewer tokens."
        )
    return _run(_Shelf(load, plans, costs, max_bytes), threads)


def _run(shelf: "_Shelf[Plan, Loaded]", threads: int) -> Generator[Loaded, None, None]:
    # Daemons: a loop that is never finished must not keep the program from ending.
    workers = [threading.Thread(target=shelf.work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for number in range(len(shelf.plans)):
            yield shelf.take(number)
            shelf.give_back(number)
    finally:
        shelf.close()
        for worker in workers:
            worker.join()


class _Shelf(Generic[Plan, Loaded]):
    """What is loaded and not yet used. Plans are begun in order, so the next one always fits."""

    def __init__(
        self,
        load: Callable[[Plan], Loaded],
        plans: Sequence[Plan],
        costs: Sequence[int],
        max_bytes: int,
    ) -> None:
        self.plans = plans
        self._load = load
        self._costs = costs
        self._room = max_bytes
        self._begun = 0
        self._is_closed = False
        self._loaded: dict[int, Loaded | BaseException] = {}
        self._changed = threading.Condition()

    def work(self) -> None:
        while (number := self._begin()) is not None:
            try:
                loaded: Loaded | BaseException = self._load(self.plans[number])
            except BaseException as error:  # raised again where it is waited for
                loaded = error
            with self._changed:
                self._loaded[number] = loaded
                self._changed.notify_all()
            del loaded

    def take(self, number: int) -> Loaded:
        with self._changed:
            self._changed.wait_for(lambda: number in self._loaded)
            loaded = self._loaded.pop(number)
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    def give_back(self, number: int) -> None:
        with self._changed:
            self._room += self._costs[number]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._loaded.clear()
            self._changed.notify_all()

    def _begin(self) -> int | None:
        """The next plan, once there is room for it; None when there is nothing left to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or self._begun == len(self.plans)
                    or self._costs[self._begun] <= self._room
                )
            )
            if self._is_closed or self._begun == len(self.plans):
                return None
            number = self._begun
            self._begun += 1
            self._room -= self._costs[number]
            return number
