"""What the client itself costs, measured against a server that does nothing.

The null server sends small chunks at a fixed pace from a thread of its own, as a language model
would, each in a packet of its own. What the client's thread computes meanwhile, divided by the
chunks, says how many it could take at most; the time to the first chunk is what every time to
first token includes of the client and the loopback.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fledge.data.regenerate.endpoint import Endpoint
from fledge.lab.load_driver import Drive
from fledge.lab.load_http import HttpDriver
from fledge.lab.load_point import Point
from fledge.lab.load_prompts import user_prompt
from fledge.lab.load_query import Query
from fledge.lab.statistics import percentile

_USERS, _REQUESTS, _CHUNKS = 8, 16, 64
_PACE_S = 0.004
_CHUNK = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"null",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_LAST = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"null",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def measure_client() -> dict[str, Any]:
    """Seconds of computing per chunk, chunks per second at most, seconds added to a first token."""
    with null_server() as url:
        query = Query(model="null", counting="chunks", timeout_s=60)
        with HttpDriver(Endpoint.parse(url), query) as driver:
            alone = _drive(driver, users=1, requests=4)
            together = _drive(driver, users=_USERS, requests=_REQUESTS)
    answers = together.answers
    seconds = max(one.end for one in answers) - min(one.due for one in answers)
    s_per_chunk = together.client.busy_share * seconds / max(1, together.client.chunks)
    return {
        "s_per_chunk": s_per_chunk,
        "most_chunks_per_s": 1 / s_per_chunk,
        # The first request also opens the connection.
        "first_token_s": percentile([one.ttft_s for one in alone.answers[1:]], 0.5),
    }


def _drive(driver: HttpDriver, *, users: int, requests: int) -> Drive:
    return driver.drive(
        Point("closed", users),
        [user_prompt("nothing")] * requests,
        max_tokens=_CHUNKS,
        seed=0,
        on_answer=lambda: None,
    )


@contextmanager
def null_server() -> Iterator[str]:
    """The address of a server that answers anything with empty talk."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, one after the other."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(_content_length(head))
            writer.write(_HEAD)
            for _ in range(_CHUNKS):
                writer.write(_framed(_CHUNK))
                await asyncio.sleep(_PACE_S)
            writer.write(_framed(_LAST) + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        return  # the client has gone, or the measurement is over
    finally:
        writer.close()


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.removeprefix(b"content-length:"))
    return 0


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
