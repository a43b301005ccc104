"""What every request passes: a name, a key, a body of bounded size and time, a line in the log."""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fledge.server.api_errors import (
    ApiError,
    BodyTooLargeError,
    ClientGoneError,
    InvalidRequestError,
    SlowClientError,
    UnauthorizedError,
    dump,
)
from fledge.server.api_keys import ANYONE, Caller
from fledge.server.logs import request_log
from fledge.server.service import Service
from fledge.server.streamed_body import StreamedBody
from fledge.server.web_page import PAGE_PATHS

PATHS = (
    "/",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/speculation",
    "/v1/files",
    "/v1/batches",
    "/tokenize",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
)
_COLLECTIONS = ("/v1/files", "/v1/batches")
OPEN_PATHS = frozenset(("/health", "/ready", "/metrics")) | PAGE_PATHS
"""Asked by probes, scrapers and browsers, which hold no key, and too often for the log; they tell
nothing of any prompt."""

_POLLED_PATH = "/v1/speculation"
"""Every open page asks once a second."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_OTHER = "other"
_FORM_BYTES = 64 << 10
"""What a form has beside its file."""


class Gate:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = _Passage(scope, send)
        self._service.num_open += 1
        try:
            await self._pass(scope, receive, passage)
        finally:
            self._service.num_open -= 1
            self._note(scope, passage)

    async def _pass(self, scope: Scope, receive: Receive, passage: "_Passage") -> None:
        try:
            caller = self._find_caller(scope)
            scope["state"]["caller"] = caller
            passage.fields["caller"] = caller.name
            if (scope["method"], scope["path"]) == ("POST", "/v1/files"):
                passage.body = self._stream_body(scope, receive)
                await self._app(scope, passage.body.receive, passage.send)
                return
            body = await self._read_body(scope, receive)
            await self._app(scope, _replay(body, receive), passage.send)
        except ApiError as error:
            await passage.refuse(error)
        except Exception:
            request_log.exception("a request failed", extra={"fields": passage.fields})
            if not passage.status:
                await passage.refuse(ApiError("something went wrong in the server."))

    def _find_caller(self, scope: Scope) -> Caller:
        keys = self._service.keys
        if not keys.are_needed or scope["path"] in OPEN_PATHS:
            return ANYONE
        given = _header(scope, b"authorization")
        kind, _, key = given.partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("this server wants an API key: Authorization: Bearer KEY.")
        caller = keys.find(key.strip())
        if caller is None:
            raise UnauthorizedError("this API key is not one of this server's.")
        return caller

    def _stream_body(self, scope: Scope, receive: Receive) -> StreamedBody:
        """A body that is read while it comes."""
        settings = self._service.settings
        limit = settings.batches.max_file_bytes + _FORM_BYTES
        length = _header(scope, b"content-length")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        return StreamedBody(receive, max_bytes=limit, timeout_s=settings.client_timeout_s)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body; nothing else happens for a request before it is here."""
        settings = self._service.settings
        limit = settings.max_body_bytes
        length = _header(scope, b"content-length")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(settings.client_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError("the client left before its request was whole.")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise SlowClientError(
                f"the request was not whole after {settings.client_timeout_s:g} s."
            ) from None

    def _note(self, scope: Scope, passage: "_Passage") -> None:
        path = scope["path"]
        error = scope["state"].get("error")
        status = error.status if error is not None else passage.status or 499
        seconds = time.perf_counter() - passage.started
        label = _label(path)
        self._service.metrics.count_request(label, status, seconds)
        if path in OPEN_PATHS or (path == _POLLED_PATH and status == 200):
            return
        passage.fields |= {"status": status, "seconds": round(seconds, 6)}
        if error is not None:
            passage.fields["error"] = str(error)
        request_log.info("request", extra={"fields": passage.fields})


class _Passage:
    """One request on its way through the gate."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status = 0
        self.body: StreamedBody | None = None
        """One that is still coming while the request is served."""

        self.started = time.perf_counter()
        given = _header(scope, b"x-request-id")
        self._request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        client = scope.get("client")
        self.fields: dict[str, object] = {
            "request_id": self._request_id,
            "method": scope["method"],
            "path": scope["path"],
            "address": client[0] if client else None,
        }
        scope.setdefault("state", {})["fields"] = self.fields
        self._scope, self._send = scope, send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), self._id_header]
            if self.body is not None and not self.body.is_whole:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)

    @property
    def _id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._request_id.encode()

    async def refuse(self, error: ApiError) -> None:
        self._scope["state"]["error"] = error
        if isinstance(error, ClientGoneError):
            return
        body = dump(error.body)
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if not isinstance(error, InvalidRequestError):
            # What is left of a body that nobody reads must not be taken for the next request.
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _label(path: str) -> str:
    """What the figures call a path; ids are left out."""
    if path in PAGE_PATHS:
        return "/"
    for known in PATHS:
        if path == known or (known in _COLLECTIONS and path.startswith(f"{known}/")):
            return known
    return _OTHER


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """The body in one piece, then whatever the connection says."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return parts.pop() if parts else await receive()

    return replayed


def _header(scope: Scope, name: bytes) -> str:
    found = next((value for key, value in scope["headers"] if key == name), b"")
    return str(found.decode("latin-1"))


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body of the request is larger than {limit} bytes, the limit of this server."
    )
