"""Sends a response to a client that has to take it in time."""

import asyncio

from starlette.types import Scope, Send

from fledge.server.api_errors import ClientGoneError
from fledge.server.http_guard import TRANSPORT

_CALM_BYTES = 16 << 10
"""Sending waits for a client only when much more than this lies unsent."""


class ClientSender:
    """Sends parts of a response to a client that has to take them in time."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._transport: asyncio.Transport | None = scope["state"].get(TRANSPORT)

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() < _CALM_BYTES:
            await self._send(message)  # the server would not wait for this client
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError("the client does not read what it asked for.") from None

    async def cut(self) -> None:
        """End the connection without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()
            await asyncio.sleep(0)
