"""Loads an OpenAI-compatible server over HTTP and takes times.

One event loop, one connection for each user, no JSON while the clock runs: what the client costs
is measured beside everything else, by the time its thread computes and by how late it comes.
"""

import asyncio
import gc
import resource
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import httpx

from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.failures import explain_status, explain_transport
from fledge.lab.load_answer import Answer, Failure, RawAnswer, read_answer
from fledge.lab.load_driver import ClientLoad, Drive, OnAnswer
from fledge.lab.load_point import Point, send_times_s
from fledge.lab.load_prompts import LoadPrompt
from fledge.lab.load_query import Query
from fledge.lab.sse import SseReader
from fledge.lab.statistics import percentile

_clock = time.perf_counter
_TICK_S = 0.01
_LOST_AFTER = 16
"""So many failed connections in a row, beyond the users', and nobody is there any more."""

_BROKEN = ("connection", "stream")
_KEEP_ALIVE_S = 4.0
"""Many servers close connections that are idle for five seconds."""

NOT_A_STREAM = "not a stream"
BUSY = "busy"
_KINDS = {408: "timeout", 429: BUSY, 503: BUSY, 504: "timeout"}


@dataclass(slots=True)
class _Load:
    """One drive while it runs."""

    bodies: Sequence[bytes]
    on_answer: OnAnswer
    patience: int
    raw: list[RawAnswer] = field(default_factory=list)
    num_refused: int = 0
    lost: str | None = None

    def take(self, answer: RawAnswer) -> None:
        self.raw.append(answer)
        self.on_answer()
        if answer.failure is None or answer.failure.kind != "connection":
            self.num_refused = 0
            return
        self.num_refused += 1
        if self.num_refused > self.patience:
            self.lost = answer.failure.reason


class HttpDriver:
    """Connections to one server, kept from one load to the next."""

    def __init__(
        self,
        endpoint: Endpoint,
        query: Query,
        *,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.endpoint, self.query = endpoint, query
        self._count_tokens = count_tokens
        self._runner = asyncio.Runner()
        self._idle: list[httpx.AsyncClient] = []
        is_secure = endpoint.url.startswith("https:")
        # Reading all certificates takes a tenth of a second; without TLS none is needed.
        empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls = httpx.create_ssl_context() if is_secure else empty
        _allow_many_connections()

    def __enter__(self) -> "HttpDriver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        for client in self._idle:
            await client.aclose()

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"url": self.endpoint.url, "model": self.query.model, "tokens": self.query.counting}

    def refine(self, query: Query) -> None:
        """What became known about the server."""
        self.query = query

    def get(self, path: str) -> httpx.Response:
        """A plain call, outside of any measurement."""

        async def call() -> httpx.Response:
            async with self._make_client() as client:
                return await client.get(self.endpoint.url + path, timeout=self.query.timeout_s)

        return self._runner.run(call())

    def ask(self, prompt: LoadPrompt, max_tokens: int) -> RawAnswer:
        """One request, unread."""
        body = self.query.body(prompt, max_tokens)
        return self._runner.run(self._ask(body, _clock()))

    def drive(
        self,
        point: Point,
        prompts: Sequence[LoadPrompt],
        *,
        max_tokens: int,
        seed: int,
        on_answer: OnAnswer,
    ) -> Drive:
        """Send a request for each prompt, as the load says."""
        bodies = [self.query.body(prompt, max_tokens) for prompt in prompts]
        patience = _LOST_AFTER + (point.users if point.is_closed else 0)
        load = _Load(bodies, on_answer, patience)
        run = self._closed(load, point) if point.is_closed else self._open(load, point, seed)
        # A collection of garbage in the middle would stop all streams for a moment.
        gc.disable()
        try:
            cost = self._runner.run(_costed(run))
        finally:
            gc.enable()
        client = replace(cost, chunks=sum(len(raw.events) for raw in load.raw))
        lost = load.lost or self._missing(load.raw)
        return Drive(answers=[self.read(raw) for raw in load.raw], client=client, lost=lost)

    def _missing(self, raw: Sequence[RawAnswer]) -> str | None:
        """Why the server is not there any more, when connections broke and it is not."""
        if not any(one.failure is not None and one.failure.kind in _BROKEN for one in raw):
            return None
        try:
            self.get("/models")
        except httpx.TransportError as error:
            return explain_transport(error)
        return None

    def read(self, raw: RawAnswer) -> Answer:
        return read_answer(raw, self.query.counting, self._count_tokens)

    async def _closed(self, load: _Load, point: Point) -> None:
        """Users who ask, wait, and ask again."""
        bodies = iter(load.bodies)

        async def user() -> None:
            for body in bodies:
                load.take(await self._ask(body, _clock()))
                if load.lost is not None:
                    return

        await asyncio.gather(*(user() for _ in range(min(point.users, len(load.bodies)))))

    async def _open(self, load: _Load, point: Point, seed: int) -> None:
        """Requests at times that were fixed before."""
        start = _clock()

        async def request(body: bytes, due: float) -> None:
            await asyncio.sleep(max(0.0, due - _clock()))
            if load.lost is None:
                load.take(await self._ask(body, due))

        times = send_times_s(point, len(load.bodies), seed)
        pairs = zip(load.bodies, times, strict=True)
        await asyncio.gather(*(request(body, start + due_s) for body, due_s in pairs))

    async def _ask(self, body: bytes, due: float) -> RawAnswer:
        is_used = bool(self._idle)
        client = self._idle.pop() if is_used else self._make_client()
        raw = RawAnswer(due=due, sent=_clock(), events=[])
        try:
            async with asyncio.timeout(self.query.timeout_s):
                try:
                    await self._stream(client, body, raw)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    if raw.events or not is_used:
                        raise
                    # The server gave up the idle connection while we were sending: ask again on
                    # a new one. The time that this took counts, as it would for any client.
                    await client.aclose()
                    client = self._make_client()
                    await self._stream(client, body, raw)
        except TimeoutError:
            reason = f"no whole answer within {self.query.timeout_s:g} s"
            raw.failure = Failure(kind="timeout", reason=reason)
        except httpx.TransportError as error:
            kind = "stream" if raw.events else "connection"
            raw.failure = Failure(kind=kind, reason=explain_transport(error))
        finally:
            self._idle.append(client)
        raw.end = raw.events[-1][0] if raw.events else _clock()
        return raw

    async def _stream(self, client: httpx.AsyncClient, body: bytes, raw: RawAnswer) -> None:
        url = self.endpoint.url + self.query.route
        async with client.stream("POST", url, content=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                reason = self.endpoint.without_key(explain_status(response.status_code, text))
                kind = _KINDS.get(response.status_code, f"http {response.status_code}")
                raw.failure = Failure(kind=kind, reason=reason)
                return
            content_type = response.headers.get("content-type", "no content type")
            if not content_type.startswith("text/event-stream"):
                await response.aread()
                raw.failure = Failure(kind=NOT_A_STREAM, reason=content_type)
                return
            reader, events = SseReader(), raw.events
            async for piece in response.aiter_raw():
                now = _clock()
                events.extend([(now, event) for event in reader.feed(piece)])

    def _make_client(self) -> httpx.AsyncClient:
        """Each request has a client of its own: a pool of n connections costs httpx n steps."""
        key = self.endpoint.api_key
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.AsyncClient(
            headers=headers,
            timeout=None,  # the whole request has one limit, see `_ask`
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
            verify=self._tls,
            trust_env=not self.endpoint.is_loopback,
        )


async def _costed(run: Any) -> ClientLoad:
    """Run a load, and see how busy this thread is and how late it comes to what is due."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            due = _clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lags.append(max(0.0, _clock() - due))

    ticker = asyncio.create_task(tick())
    start, cpu_start = _clock(), time.thread_time()
    try:
        await run
    finally:
        ticker.cancel()
    wall_s = max(_clock() - start, 1e-9)
    busy = (time.thread_time() - cpu_start) / wall_s
    lag_s = percentile(lags, 0.99) if lags else None
    return ClientLoad(busy_share=min(1.0, busy), lag_s=lag_s, chunks=0)


def _allow_many_connections() -> None:
    """Each stream is an open file, and the usual limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
