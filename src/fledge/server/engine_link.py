"""One engine process as the server's event loop sees it."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from fledge.server.wire import EngineChoice, FrameBuffer, News, Order, pack

_KILL_S = 5.0
"""Seconds between asking an engine process to leave and making it leave."""


class EngineLink(asyncio.Protocol):
    """Starts an engine process and talks with it."""

    def __init__(self, on_news: Callable[[News], None]) -> None:
        self._on_news = on_news
        self._buffer = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = asyncio.Event()
        self._heard = time.monotonic()

    async def start(self, choice: EngineChoice) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            module = "fledge.server.engine_process"
            # -P: a file in the working directory must not be taken for a module.
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints is no result of ours
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=ours)
        self._write(choice)

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """Seconds since the process was last heard of."""
        return time.monotonic() - self._heard

    def send(self, order: Order) -> None:
        """An order; one that comes too late for the process is lost, and its end is reported."""
        self._write(order)

    def close(self) -> None:
        """The process leaves when nobody talks to it any more."""
        if self._transport is not None:
            self._transport.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def wait_closed(self, timeout_s: float) -> bool:
        """Whether the process has gone, after waiting for it."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            return False
        return True

    async def reap(self) -> str:
        """See to it that the process is gone; says how it ended."""
        self.close()
        process = self._process
        assert process is not None
        try:
            code = await asyncio.to_thread(process.wait, _KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = await asyncio.to_thread(process.wait)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _write(self, message: Any) -> None:
        if self._transport is not None and not self._closed.is_set():
            self._transport.write(pack(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        for news in self._buffer.feed(data):
            self._on_news(news)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._closed.set()
