"""Connections that say nothing, or say it too slowly, are closed.

uvicorn waits for ever for the first request of a connection and for the end of its headers.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEADER_BYTES = 64 << 10
TRANSPORT = "fledge_transport"
"""Where a response finds its connection, to cut off a client that does not read."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP with a limit on the time and size of headers."""

    timeout_s = 30.0
    _guard: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _is_in_headers = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > _MAX_HEADER_BYTES:
            self._disarm()
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        self._is_in_headers, self._num_header_bytes = False, 0
        self.scope["state"][TRANSPORT] = self.transport
        super().on_headers_complete()

    def _arm(self) -> None:
        self._disarm()
        self._guard = self.loop.call_later(self.timeout_s, self._on_late)

    def _disarm(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None

    def _on_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


def guarded_protocol(timeout_s: float) -> type[GuardedProtocol]:
    """The protocol with this much patience."""
    return type("GuardedProtocol", (GuardedProtocol,), {"timeout_s": timeout_s})
