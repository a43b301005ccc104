"""Many streams, and clients that misbehave beside them: is anything lost, does anything leak?

    python tools/soak_server.py --streams 200 --seconds 300 --out benchmarks/FILE.json

A real `fledge serve` on a tiny random target. So many streams are held all the time: whoever is
finished asks again. Beside them clients vanish in mid-stream, send garbage, send a byte a second,
or open a connection and say nothing. Every stream must be whole and count the tokens it asked for.
At the end nothing may be left: no answers, no cache blocks, no open files, no memory that went on
growing.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server_subject import (
    MODEL,
    Subject,
    cpu_seconds,
    open_files,
    percentile,
    resident_bytes,
    serving,
)

from fledge.contracts import provenance

_LONGEST_WAIT_S = 600.0
_SAMPLE_S = 5.0


class Soak:
    """All clients of one run."""

    def __init__(self, subject: Subject, *, num_streams: int, seconds: float, seed: int) -> None:
        self._subject = subject
        self._num_streams, self._seconds = num_streams, seconds
        self._rng = random.Random(seed)
        self._deadline = 0.0
        parts = urlsplit(subject.url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.first_token_s: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self.num_open = 0
        self.num_tokens = self.num_chunks = 0

    async def run(self) -> None:
        self._deadline = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_streams):
                group.create_task(self._keep_streaming())
            for misbehave in (self._vanish, self._garbage, self._trickle, self._silence):
                for _ in range(3):
                    group.create_task(self._repeat(misbehave))
            group.create_task(self._sample())

    @property
    def _is_on(self) -> bool:
        return time.monotonic() < self._deadline

    async def _keep_streaming(self) -> None:
        while self._is_on:
            started = time.monotonic()
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    await self._stream()
            except (OSError, EOFError, AssertionError, ValueError, KeyError) as error:
                self.errors.append(f"{error!r} after {time.monotonic() - started:.1f} s"[:300])
                await asyncio.sleep(0.5)

    def _body(self, max_tokens: int) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": "x" * self._rng.randrange(1, 60),
            "max_tokens": max_tokens,
            "seed": self._rng.randrange(1 << 30),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _stream(self) -> None:
        """One stream from its request to its end, over a plain socket: 200 of them cost little."""
        wanted = self._rng.randrange(10, 120)
        body = json.dumps(self._body(wanted)).encode()
        started = time.monotonic()
        self.num_open += 1
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(self._request(body) + body)
                status = await reader.readline()
                assert b" 200 " in status, status
                self.first_token_s.append(time.monotonic() - started)
                chunks = await _events(reader)
            finally:
                writer.close()
        finally:
            self.num_open -= 1
        usage = json.loads(chunks[-1])["usage"]
        assert usage["completion_tokens"] == wanted, (usage, wanted)
        self.done["streams"] += 1
        self.num_tokens += wanted
        self.num_chunks += len(chunks)

    async def _repeat(self, misbehave: Any) -> None:
        while self._is_on:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError as error:
                self.errors.append(f"a connection was refused: {error!r}")
                await asyncio.sleep(1)
                continue
            try:
                await misbehave(reader, writer)
                self.done[misbehave.__name__.strip("_")] += 1
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                self.done["cut off by the server"] += 1
            finally:
                writer.transport.abort()
            await asyncio.sleep(0.2)

    def _request(self, body: bytes) -> bytes:
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )

    async def _vanish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(self._body(3000)).encode()
        writer.write(self._request(body) + body)
        await writer.drain()
        await asyncio.wait_for(reader.readuntil(b"data: "), _LONGEST_WAIT_S)
        await asyncio.sleep(self._rng.random())

    async def _garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._rng.randbytes(self._rng.randrange(1, 5000)) + b"\r\n\r\n")
        await writer.drain()
        await asyncio.wait_for(reader.read(), _LONGEST_WAIT_S)

    async def _trickle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        body = b'{"model": "tiny", "prompt": "' + b"x" * 4000
        for byte in self._request(body) + body:
            writer.write(bytes([byte]))
            await writer.drain()
            if not self._is_on:
                return
            await asyncio.sleep(1.0)

    async def _silence(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await asyncio.wait_for(reader.read(), max(1.0, self._deadline - time.monotonic()))

    async def _sample(self) -> None:
        server, engine = self._subject.process_id, self._subject.engine_process_id
        started = time.monotonic()
        while self._is_on:
            figures = await asyncio.to_thread(self._subject.figures)
            self.samples.append(
                {
                    "seconds": round(time.monotonic() - started, 1),
                    "open_streams": self.num_open,
                    "server_bytes": resident_bytes(server),
                    "engine_bytes": resident_bytes(engine),
                    "server_files": open_files(server),
                    "answers": figures["fledge_requests_running"]
                    + figures["fledge_requests_waiting"],
                    "cache_usage": round(figures["fledge_cache_usage_ratio"], 4),
                }
            )
            await asyncio.sleep(_SAMPLE_S)


async def _events(reader: asyncio.StreamReader) -> list[bytes]:
    """All events of a stream that has a proper end."""
    found = []
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            return found
        if line.startswith(b"data: "):
            found.append(line.removeprefix(b"data: "))
    raise EOFError("a stream had no end")


def wait_until_idle(subject: Subject) -> dict[str, Any]:
    """What is left when everybody has gone."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < deadline:
        stats: dict[str, Any] = subject.speculation["stats"]
        if not stats["num_running"] + stats["num_waiting"] and not stats["cache_usage"]:
            return stats
        time.sleep(0.5)
    raise SystemExit(f"answers or cache blocks are left: {stats}")


def soak(num_streams: int, seconds: float, seed: int) -> dict[str, Any]:
    options = ["--cache-tokens", "32768", "--max-requests", "64"]
    options += [
        "--set",
        f"serve.max_queue={num_streams + 64}",
        "--set",
        "serve.client_timeout_s=20",
    ]
    with (
        tempfile.TemporaryDirectory() as place,
        serving(Path(place), *options) as subject,
    ):
        server = subject.process_id
        files_before, cpu_before = open_files(server), cpu_seconds(server)
        running = Soak(subject, num_streams=num_streams, seconds=seconds, seed=seed)
        asyncio.run(running.run())
        cpu_s = cpu_seconds(server) - cpu_before
        stats = wait_until_idle(subject)
        time.sleep(25.0)  # connections that say nothing are closed after 20 s
        figures = subject.figures()
        log = (Path(place) / "server.log").read_text(encoding="utf-8")
        return {
            "streams": num_streams,
            "seconds": seconds,
            "errors": len(running.errors),
            "first_errors": running.errors[:5],
            "done": dict(running.done),
            "answer_tokens": running.num_tokens,
            "chunks": running.num_chunks,
            "first_token_s": {
                "median": round(percentile(running.first_token_s, 0.5), 3),
                "p99": round(percentile(running.first_token_s, 0.99), 3),
            },
            "server_cpu_s": round(cpu_s, 1),
            "open_files": {"before": files_before, "after": open_files(server)},
            "engine_restarts": figures["fledge_engine_restarts_total"],
            "cache_usage_after": stats["cache_usage"],
            "log_lines_of_errors": sum('"level": "error"' in line for line in log.splitlines()),
            "samples": running.samples,
        }


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong with a run."""
    wrong = []
    if result["errors"]:
        wrong.append(f"{result['errors']} streams failed: {result['first_errors']}")
    if result["engine_restarts"] or result["log_lines_of_errors"]:
        wrong.append("the engine was started again, or the log has errors")
    if result["open_files"]["after"] > result["open_files"]["before"] + 8:
        wrong.append(f"open files: {result['open_files']}")
    samples = result["samples"]
    half = samples[len(samples) // 2 :]
    for name in ("server_bytes", "engine_bytes"):
        growth = max(one[name] for one in half) - max(one[name] for one in samples[: len(half)])
        if growth > 32 << 20:
            wrong.append(f"{name} grew by {growth >> 20} MiB in the second half")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = soak(options.streams, options.seconds, options.seed)
    wrong = verdict(result)
    document = {"provenance": provenance.collect(device="cpu"), "wrong": wrong, **result}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(
        json.dumps({name: value for name, value in document.items() if name != "samples"}, indent=2)
    )
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
