"""The answers to one HTTP request while the engine makes them."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from fledge.server.api_errors import ApiError
from fledge.server.wire import Piece

Release = Callable[[Sequence[int]], None]


class Answers:
    """A letter box: the engine's pieces go in, whoever writes the response takes them out.

    Leaving its context gives up what is still unfinished, so that the engine stops working for a
    client that has gone or an answer that took too long.
    """

    def __init__(self, numbers: range, release: Release) -> None:
        """The choices of the response are numbered as they are in the engine, in this order."""
        self.numbers = numbers
        self._release = release
        self._unfinished = set(numbers)
        self._pieces: list[Piece] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Answers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._release(self.numbers)

    @property
    def is_finished(self) -> bool:
        """All choices are; pieces may still lie in the box."""
        return not self._unfinished

    @property
    def unfinished(self) -> frozenset[int]:
        return frozenset(self._unfinished)

    def choice(self, piece: Piece) -> int:
        """Which choice of the response a piece belongs to."""
        return piece.number - self.numbers.start

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if piece.finish is not None:
            self._unfinished.discard(piece.number)
        self._wake()

    def fail(self, error: ApiError) -> None:
        """No more pieces will come, unless all are here already; the first reason counts."""
        if self._error is None and self._unfinished:
            self._error = error
            self._wake()

    def fail_at(self, deadline: float, error: ApiError) -> None:
        """Fail at this time of the running loop."""
        self._timer = asyncio.get_running_loop().call_at(deadline, self.fail, error)

    async def take(self) -> list[Piece]:
        """All pieces that came since the last call; none when all choices are finished.

        What came before a failure is handed out before the failure is raised.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._pieces = self._pieces, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
