"""Asks our own endpoints from inside, so that a line of a batch is treated like any request."""

import asyncio
import json
import logging
import secrets
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from fledge.server.api_errors import ApiError, dump
from fledge.server.api_keys import Caller
from fledge.server.terms import BATCH, TERMS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """What a client would have got."""

    request_id: str
    status: int
    body: Any


async def ask(app: ASGIApp, path: str, body: Any, caller: Caller) -> InnerAnswer:
    """Send a body to an endpoint on the terms of a batch; leaving early gives the answer up."""
    request_id = secrets.token_hex(12)
    call = _Call(dump(body))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {"caller": caller, "fields": {"address": None}, TERMS: BATCH},
    }
    try:
        await app(scope, call.receive, call.send)
        return InnerAnswer(request_id, call.status, json.loads(b"".join(call.parts)))
    except Exception:
        _log.exception("a line of a batch failed (%s)", request_id)
        error = ApiError("something went wrong in the server.")
        return InnerAnswer(request_id, error.status, error.body)


class _Call:
    """One request and its response, in memory."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.parts: list[bytes] = []
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # this client never leaves
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
