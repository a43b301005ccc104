"""A real HTTP server with OpenAI's routes: its answers depend on the request alone, and it fails on
purpose.

Words in the last message steer it: [call NAME], [think], [long], [filter], [refuse], [poison].
It counts what it was asked, what it answered in full, and how many requests were in flight when.

    python tests/unit/data/flaky_server.py --service-s 0.5       prints its URL; GET /stats
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

ALL_FAULTS = (
    "429",
    "500",
    "503",
    "408",
    "hang",
    "torn",
    "torn chunks",
    "closed",
    "half json",
    "html",
    "empty",
    "no choices",
    "abort",
    "slow",
)
"""Ways to fail, except `slow`, which only takes long."""

WORDS = ["wing", "feather", "Adler", "águila", "鷹", "орёл", "nest", "wind", "🦅", "talon"]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Response:
    status: int
    document: Any
    headers: dict[str, str] = field(default_factory=dict)
    """An entry `fault` says how sending it goes wrong."""

    content: bytes | None = None

    @property
    def body(self) -> bytes:
        return self.content if self.content is not None else json.dumps(self.document).encode()


def key_of(body: Any) -> str:
    """What makes two requests the same."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def error(status: int, message: str, **headers: str) -> Response:
    return Response(status, {"error": {"message": message}}, headers)


class FlakyServer:
    """Serves on a loopback port from a thread of its own."""

    def __init__(
        self,
        *,
        faults: tuple[str, ...] = (),
        max_faults: int = 3,
        service_s: tuple[float, float] = (0.0, 0.0),
        api_key: str | None = None,
        models: tuple[str, ...] = ("tiny",),
        seed: int = 0,
    ) -> None:
        self._faults, self._max_faults, self._seed = faults, max_faults, seed
        self._service_s = service_s
        self.api_key = api_key
        self.models = models
        self.is_strict = True
        """It refuses what is marked so."""

        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        """Whole answers sent, by the key of the request."""

        self.faults_met: Counter[str] = Counter()
        self.bodies: dict[str, Any] = {}
        self.timeline: list[tuple[float, int]] = []
        self.last_new = 0.0
        """When something was asked for the first time, most recently."""

        self.in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "FlakyServer":
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (request := await _read(reader)) is not None:
                with self._counted(request):
                    response = await self._respond(request)
                    is_whole = await _send(writer, reader, response)
                if not is_whole:
                    break
                is_good = response.status == 200 and "fault" not in response.headers
                if is_good and request.path.endswith("/completions"):
                    self.answered[key_of(json.loads(request.body))] += 1
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    @contextlib.contextmanager
    def _counted(self, request: Request) -> Iterator[None]:
        if request.method != "POST":
            yield
            return
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.in_flight += change
        self.timeline.append((time.monotonic(), self.in_flight))

    async def _respond(self, request: Request) -> Response:
        if self.api_key is not None and request.headers.get("authorization") != (
            f"Bearer {self.api_key}"
        ):
            return error(401, f"wrong key: {request.headers.get('authorization')}")
        return await self.route(request)

    async def route(self, request: Request) -> Response:
        """What there is; doubles with more routes come here first."""
        if request.path == "/stats":
            met = sum(self.faults_met.values())
            stats = {"timeline": self.timeline, "faults": met, "last_new": self.last_new}
            return Response(200, stats)
        if request.path == "/v1/models":
            return Response(200, {"data": [{"id": name} for name in self.models]})
        if request.path in ("/v1/chat/completions", "/v1/completions"):
            return await self._complete(request)
        return error(404, f"no route {request.path}")

    async def _complete(self, request: Request) -> Response:
        body = json.loads(request.body)
        key = key_of(body)
        attempt = self.asked[key]
        if attempt == 0:
            self.last_new = time.monotonic()
        self.asked[key] += 1
        self.bodies[key] = body
        fault = self._fault(key, attempt)
        low, high = self._service_s
        if high:
            await asyncio.sleep(low + (high - low) * random.Random(key).random())
        if fault is None:
            return self.answer(body)
        self.faults_met[fault] += 1
        return _spoiled(fault, self.answer(body))

    def _fault(self, key: str, attempt: int) -> str | None:
        chance = random.Random(f"{self._seed} {key}")
        count = chance.randint(0, self._max_faults) if self._faults else 0
        planned = [chance.choice(self._faults) for _ in range(count)]
        return planned[attempt] if attempt < len(planned) else None

    def answer(self, body: dict[str, Any]) -> Response:
        """The answer to a request; the same to the same request, whenever it comes."""
        if body["model"] not in self.models:
            return error(404, f"The model `{body['model']}` does not exist.")
        messages = body.get("messages") or [{"content": body.get("prompt")}]
        last = str(messages[-1].get("content"))
        if "[refuse]" in last and self.is_strict:
            return error(400, "this model's maximum context length is 64 tokens")
        if "[poison]" in last:
            return error(500, "worker died")
        chance = random.Random(key_of(body))
        text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 30)))
        finish = "length" if "[long]" in last else "stop"
        finish = "content_filter" if "[filter]" in last else finish
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if "prompt" in body:
            choice["text"] = text
        else:
            choice["message"] = _message(text, last)
            if choice["message"].get("tool_calls"):
                choice["finish_reason"] = "tool_calls"
        return Response(200, {"id": "x", "model": body["model"], "choices": [choice]})


def _message(text: str, last: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if "[think]" in last:
        message["reasoning_content"] = f"thinking about {text[:10]}"
    if "[reason]" in last:
        message["reasoning"] = f"reasoning about {text[:10]}"
    names = re.findall(r"\[call (\w+)\]", last)
    if names:
        message["content"] = None
        message["tool_calls"] = [
            {
                "id": f"id{number}",
                "index": number,
                "type": "function",
                "function": {"name": name, "arguments": '{"place":"Zürich"}'},
            }
            for number, name in enumerate(names)
        ]
    return message


def _spoiled(fault: str, good: Response) -> Response:
    if fault == "429":
        return error(429, "too many requests", **{"Retry-After": "0.05"})
    if fault in ("500", "503", "408"):
        return error(int(fault), "not now")
    if fault == "half json":
        return Response(200, None, {"fault": "none"}, good.body[: len(good.body) // 2])
    if fault == "html":
        kind = {"Content-Type": "text/html", "fault": "none"}
        return Response(200, None, kind, b"<html>gateway</html>")
    if fault == "empty":
        return Response(200, None, {"fault": "none"}, b"")
    if fault == "no choices":
        return Response(200, {"error": {"message": "overloaded"}}, {"fault": "none"})
    if fault == "abort":
        spoiled = json.loads(good.body)
        if good.status == 200:
            spoiled["choices"][0]["finish_reason"] = "abort"
        return Response(good.status, spoiled, {"fault": "none"})
    return Response(good.status, good.document, {"send": fault})


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    pairs = (line.split(":", 1) for line in lines)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    try:
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in _chunks(reader)])
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
    except asyncio.IncompleteReadError:
        return None  # the client was killed
    return Request(method, path, headers, body)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def _send(
    writer: asyncio.StreamWriter, reader: asyncio.StreamReader, response: Response
) -> bool:
    """False when the connection is of no use any more."""
    way = response.headers.get("send", "")
    headers = {"Content-Type": "application/json", "Content-Length": str(len(response.body))}
    headers |= {k: v for k, v in response.headers.items() if k not in ("send", "fault")}
    if way == "closed":
        return False
    if way == "hang":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), 60)  # until the client has had enough
        return False
    if way == "torn chunks":
        del headers["Content-Length"]
        headers["Transfer-Encoding"] = "chunked"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {response.status} X\r\n{lines}\r\n".encode())
    half = len(response.body) // 2
    if way == "torn chunks":
        writer.write(b"%x\r\n%s" % (len(response.body), response.body[:half]))
    elif way == "torn":
        writer.write(response.body[:half])
    elif way == "slow":
        for start in range(0, len(response.body), half + 1):
            await writer.drain()
            await asyncio.sleep(0.03)
            writer.write(response.body[start : start + half + 1])
    else:
        writer.write(response.body)
    await writer.drain()
    return way not in ("torn", "torn chunks")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--service-s", type=float, nargs=2, default=(0.5, 0.5))
    parser.add_argument("--max-faults", type=int, default=0)
    options = parser.parse_args()
    low, high = options.service_s
    faults = tuple(fault for fault in ALL_FAULTS if fault != "hang") if options.max_faults else ()
    with FlakyServer(service_s=(low, high), faults=faults, max_faults=options.max_faults) as server:
        print(server.url, flush=True)  # noqa: T201
        threading.Event().wait()


if __name__ == "__main__":
    main()
