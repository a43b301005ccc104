"""Ctrl-C as a request to stop at the next good moment, not in the middle of a pass."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, the first Ctrl-C sets `is_set`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None

    def __enter__(self) -> "StopRequest":
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
