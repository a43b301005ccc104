"""An OpenAI-compatible server that does exactly what a script says, with known times."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "scripted"


@dataclass
class Script:
    """How the server answers."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    chunks: int = 4
    tokens_per_chunk: int = 1
    has_usage: bool = True
    knows_usage: bool = True
    """It takes `stream_options` without an error."""

    is_stream: bool = True
    key: str | None = None
    models: tuple[str, ...] = (MODEL,)
    status_at: dict[int, int] = field(default_factory=dict)
    """Statuses of requests by their number, from 0; the others are answered."""

    always_status: int | None = None
    dies_at: int | None = None
    """The number of the request at which the server goes away for good."""

    cut_at: frozenset[int] = frozenset()
    """Streams that end in the middle."""

    drops_used: bool = False
    """It closes a connection at its second request, as if it had been idle for too long."""

    words: str = "word"
    num_asked: int = 0
    num_open: int = 0
    most_open: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._vanish()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _vanish(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        num_served = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n")
                     if line.startswith("content-length:")), 0,
                )  # fmt: skip
                body = await reader.readexactly(length)
                if self.script.drops_used and num_served and head.startswith("POST"):
                    return
                num_served += 1
                if not await self._answer(head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        script = self.script
        if script.key is not None and f"Bearer {script.key}".lower() not in head.lower():
            _send(writer, 401, {"error": {"message": "wrong API key"}})
            return True
        if head.startswith("GET /v1/models"):
            _send(writer, 200, {"data": [{"id": name} for name in script.models]})
            return True
        if not head.startswith(("POST /v1/chat/completions", "POST /v1/completions")):
            _send(writer, 404, {"detail": "Not Found"})
            return True
        document = json.loads(body)
        number, script.num_asked = script.num_asked, script.num_asked + 1
        script.bodies.append(document)
        status = script.always_status or script.status_at.get(number, 200)
        if not script.knows_usage and "stream_options" in document:
            status = 400
        if script.dies_at is not None and number >= script.dies_at:
            self._vanish()
            return False
        if status != 200:
            _send(writer, status, {"error": {"message": f"no, that is {status}"}})
            return True
        if not script.is_stream:
            _send(writer, 200, {"choices": [{"message": {"content": "all at once"}}]})
            return True
        script.num_open += 1
        script.most_open = max(script.most_open, script.num_open)
        try:
            return await self._stream(number, "messages" in document, writer)
        finally:
            script.num_open -= 1

    async def _stream(self, number: int, is_chat: bool, writer: asyncio.StreamWriter) -> bool:
        script = self.script
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        due = asyncio.get_running_loop().time() + script.ttft_s
        for chunk in range(script.chunks):
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            due += script.gap_s
            text = {"content": script.words} if is_chat else script.words
            choice = {"index": 0, "delta" if is_chat else "text": text}
            writer.write(_event({"choices": [choice]}))
            if number in script.cut_at and chunk == script.chunks // 2:
                await writer.drain()
                return False
        writer.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
        if script.has_usage:
            tokens = script.chunks * script.tokens_per_chunk
            writer.write(
                _event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": 5}})
            )
        writer.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True


def _event(document: dict[str, Any]) -> bytes:
    return _framed(b"data: " + json.dumps(document).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _send(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


@contextmanager
def scripted_server(**script: Any) -> Iterator[ScriptedServer]:
    server = ScriptedServer(Script(**script))
    try:
        yield server
    finally:
        server.stop()
