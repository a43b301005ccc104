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

    def __init__(self, numbers: range, release: Release, priority: int = 0) -> None:
        """The choices of the response are numbered as they are in the engine, in this order."""
        self.numbers, self.priority = numbers, priority
        self._release = release
        self._unfinished = set(numbers)
        self._pieces: list[Piece] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_quiet = False

    def __enter__(self) -> "Answers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._release(self.numbers)

    @property
    def are_over(self) -> bool:
        """All choices are finished, and all of their pieces taken."""
        return not (self._unfinished or self._pieces)

    def choice(self, piece: Piece) -> int:
        """Which choice of the response a piece belongs to."""
        return piece.number - self.numbers.start

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._is_quiet = False
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
        loop = asyncio.get_running_loop()
        self._timers["deadline"] = loop.call_at(deadline, self.fail, error)

    def stir_every(self, seconds: float) -> None:
        """Let `take` return with nothing when nothing came for so long."""
        if self._is_quiet:
            self._wake()
        self._is_quiet = True
        loop = asyncio.get_running_loop()
        self._timers["stir"] = loop.call_later(seconds, self.stir_every, seconds)

    async def take(self) -> list[Piece]:
        """All pieces that came since the last call, at least one unless it was stirred.

        What came before a failure is handed out before the failure is raised.
        """
        if not self._pieces and self._error is None and self._unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._pieces and self._error is not None:
            raise self._error
        taken, self._pieces = self._pieces, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
