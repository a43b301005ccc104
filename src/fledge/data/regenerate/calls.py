"""HTTP calls that survive a bad day: retries with growing pauses, and a verdict on each failure.

    answered                         the caller's reader makes something of the JSON
    408, 409, 425, 429, 5xx,
    no or half an answer, bad JSON   tried again after a pause; `Unanswered` when none is left
    401, 403, 404, 405, redirects    ConfigError: no other call would fare better
    any other status                 `Refused`: this call will never be served

A pause holds no slot, so other calls keep the server busy meanwhile.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.failures import (
    Backoff,
    BadDocument,
    Refused,
    Unanswered,
    explain_response,
    explain_transport,
    retry_after_s,
)

T = TypeVar("T")
Attempt = Callable[[httpx.AsyncClient], Awaitable[T]]

_PASSING = frozenset({408, 409, 425, 429})
HOPELESS = frozenset({401, 403, 404, 405})
"""Statuses that would meet every other call too."""

_NOTE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """How much is asked at once, how often and how long."""

    concurrency: int
    retries: int
    timeout_s: float
    backoff: Backoff = Backoff()


class _Passing(Exception):
    """This attempt failed; the next may not."""

    def __init__(
        self, reason: str, *, retry_after_s: float = 0.0, is_reachable: bool = True
    ) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.is_reachable = is_reachable


class Caller:
    """Calls to one server; used with `async with`."""

    def __init__(self, endpoint: Endpoint, limits: CallLimits, progress: Progress) -> None:
        self.endpoint = endpoint
        self._limits = limits
        self._progress = progress
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._idle: list[httpx.AsyncClient] = []
        is_secure = endpoint.url.startswith("https:")
        # Reading all certificates takes a tenth of a second; without TLS none is needed.
        empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls = httpx.create_ssl_context() if is_secure else empty
        self._num_failures = 0
        self._next_note = 0.0

    async def __aenter__(self) -> "Caller":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._idle:
            await client.aclose()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that nobody else uses meanwhile.

        Each slot has its own, because a pool of n connections costs httpx n steps per request.
        """
        async with self._slots:
            client = self._idle.pop() if self._idle else self._make_client()
            try:
                yield client
            finally:
                self._idle.append(client)

    def _make_client(self) -> httpx.AsyncClient:
        key = self.endpoint.api_key
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=None,  # the whole call has one limit, see `_attempt`
            verify=self._tls,
            trust_env=not self.endpoint.is_loopback,
        )

    async def get(self, path: str, read: Callable[[Any], T]) -> T:
        """What `read` makes of the JSON at a path below the endpoint's URL."""
        return await self._persist(path, lambda client: self._json(client, "GET", path, read))

    async def post(
        self, path: str, body: Any, read: Callable[[Any], T], *, retries: int | None = None
    ) -> T:
        """The same for a JSON body that is sent there; `retries` for other than the usual ones."""
        content = json.dumps(body, separators=(",", ":")).encode()
        return await self._persist(
            path, lambda client: self._json(client, "POST", path, read, content=content), retries
        )

    @property
    def limits(self) -> CallLimits:
        return self._limits

    async def upload(self, path: str, file: Path, fields: dict[str, str]) -> str:
        """Send a file as a form does; returns the id that the server gives it."""

        async def attempt(client: httpx.AsyncClient) -> str:
            with file.open("rb") as opened:
                files = {"file": (file.name, opened, "application/jsonl")}
                return await self._json(client, "POST", path, read_id, data=fields, files=files)

        return await self._persist(path, attempt)

    async def download(self, path: str, file: Path) -> None:
        """Write what is at a path into a file."""

        async def attempt(client: httpx.AsyncClient) -> None:
            async with client.stream("GET", self._url(path)) as response:
                if response.is_success:
                    with file.open("wb") as opened:
                        async for piece in response.aiter_bytes():
                            opened.write(piece)
                else:
                    await response.aread()
                    self._judge(path, response)

        await self._persist(path, attempt)

    def _url(self, path: str) -> str:
        return self.endpoint.url + path

    async def _persist(self, path: str, attempt: Attempt[T], retries: int | None = None) -> T:
        """Attempts until one succeeds or is hopeless, or the retries are used up."""
        allowed = self._limits.retries if retries is None else retries
        num_failures = 0
        while True:
            try:
                return await self._attempt(attempt)
            except _Passing as failure:
                num_failures += 1
                reason = f"{self._url(path)}: {failure}"
                if num_failures > allowed:
                    attempts = "1 attempt" if num_failures == 1 else f"{num_failures} attempts"
                    raise Unanswered(
                        f"{reason} ({attempts})", is_reachable=failure.is_reachable
                    ) from failure
                self._note(reason)
                pause_s = self._limits.backoff.pause_s(num_failures, failure.retry_after_s)
            await asyncio.sleep(pause_s)

    async def _attempt(self, attempt: Attempt[T]) -> T:
        limit_s = self._limits.timeout_s
        try:
            async with self._slot() as client, asyncio.timeout(limit_s):
                return await attempt(client)
        except TimeoutError as error:
            raise _Passing(f"no whole answer within {limit_s:g} s") from error
        except httpx.TransportError as error:
            is_reachable = not isinstance(error, httpx.ConnectError)
            raise _Passing(explain_transport(error), is_reachable=is_reachable) from error
        except httpx.DecodingError as error:
            raise _Passing(f"an answer that cannot be unpacked ({error})") from error
        except BadDocument as error:
            raise _Passing(f"an answer that makes no sense ({error})") from error

    async def _json(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        read: Callable[[Any], T],
        **options: Any,
    ) -> T:
        if "content" in options:
            options["headers"] = {"Content-Type": "application/json"}
        response = await client.request(method, self._url(path), **options)
        self._judge(path, response)
        try:
            document = json.loads(response.content)
        except ValueError as error:
            kind = response.headers.get("content-type", "no content type")
            raise BadDocument(f"{kind}, not JSON: {error}") from error
        return read(document)

    def _judge(self, path: str, response: httpx.Response) -> None:
        """Raise what a status means; nothing when it is a success."""
        status = response.status_code
        if response.is_success:
            return
        reason = self.endpoint.without_key(explain_response(response))
        if is_passing(status):
            pause_s = retry_after_s(response.headers.get("retry-after", ""))
            raise _Passing(reason, retry_after_s=pause_s)
        if status in (401, 403):
            raise ConfigError(
                f"{self._url(path)} refused the key ({reason}); put the right one into the "
                "environment (OPENAI_API_KEY, or the variable that --api-key-env names)."
            )
        if status in HOPELESS or not response.is_client_error:
            raise ConfigError(
                f"{self._url(path)} answered {reason}. Check --url and --model; "
                f"{self.endpoint.url}/models lists what is served."
            )
        raise Refused(reason)

    def _note(self, reason: str) -> None:
        """Tell the user that calls fail, but not of each."""
        self._num_failures += 1
        now = time.monotonic()
        if now >= self._next_note:
            self._next_note = now + _NOTE_EVERY_S
            count = "a call" if self._num_failures == 1 else f"{self._num_failures:,} calls"
            self._progress.note(f"{count} failed and will be tried again; the last: {reason}")


def is_passing(status: int) -> bool:
    """A failure that may be over at the next attempt."""
    return status in _PASSING or 500 <= status < 600


def read_id(document: Any) -> str:
    """The id of an object that the server made."""
    if isinstance(document, dict) and isinstance(document.get("id"), str) and document["id"]:
        return str(document["id"])
    raise BadDocument("an object without an id")
