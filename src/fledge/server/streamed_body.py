"""A body that is too large to be read before anything else happens: it is bounded on its way."""

import asyncio
import time

from starlette.types import Message, Receive

from fledge.server.api_errors import BodyTooLargeError, ClientGoneError, SlowClientError

_SLOWEST_BYTES_PER_S = 16 << 10
"""After the first seconds, whoever sends more slowly than this is sent away."""


class StreamedBody:
    """The messages of one request, as long as they are few and quick enough."""

    def __init__(self, receive: Receive, *, max_bytes: int, timeout_s: float) -> None:
        self._receive, self._max_bytes, self._timeout_s = receive, max_bytes, timeout_s
        self._started = time.monotonic()
        self._num_bytes = 0
        self.is_whole = False

    async def receive(self) -> Message:
        if self.is_whole:
            return await self._receive()
        allowed_s = self._timeout_s + self._num_bytes / _SLOWEST_BYTES_PER_S
        left_s = min(self._timeout_s, self._started + allowed_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                message = await self._receive()
        except TimeoutError:
            raise SlowClientError(
                f"the file comes too slowly: {self._num_bytes} bytes in "
                f"{time.monotonic() - self._started:.0f} s."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was whole.")
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"the body of the request is larger than {self._max_bytes} bytes, the limit of "
                "this server."
            )
        self.is_whole = not message.get("more_body")
        return message
