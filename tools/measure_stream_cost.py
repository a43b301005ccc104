"""What one chunk of a stream costs the server process, in microseconds of processor time.

    python tools/measure_stream_cost.py --out benchmarks/FILE.json

A real `fledge serve` on a tiny target; its engine, and so its passes, is a process of its own and
does not count. Streams are long, so that what a request costs once is small; it is measured too, by
streams of one token.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server_subject import MODEL, Subject, cpu_seconds, serving

from fledge.contracts import provenance


async def stream(subject: Subject, path: str, max_tokens: int) -> int:
    """One stream over a plain socket; returns its chunks."""
    prompt: dict[str, Any] = {"prompt": "x"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    asked = {"model": MODEL, "max_tokens": max_tokens, "stream": True, **prompt}
    body = json.dumps(asked).encode()
    parts = urlsplit(subject.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    num_chunks = 0
    while (line := await reader.readline()) and line != b"data: [DONE]\n":
        num_chunks += line.startswith(b"data: ")
    assert line, "a stream had no end"
    writer.close()
    return num_chunks


async def measure(subject: Subject, path: str, *, num_streams: int, max_tokens: int) -> Any:
    before = cpu_seconds(subject.process_id)
    chunks = await asyncio.gather(*(stream(subject, path, max_tokens) for _ in range(num_streams)))
    return cpu_seconds(subject.process_id) - before, sum(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    num = options.streams
    found = {}
    limits = ["--cache-tokens", str(num * 1024), "--max-requests", str(num)]
    with tempfile.TemporaryDirectory() as place, serving(Path(place), *limits) as subject:
        for path in ("/v1/completions", "/v1/chat/completions"):
            asyncio.run(measure(subject, path, num_streams=num, max_tokens=20))  # warms up
            short_s, _ = asyncio.run(measure(subject, path, num_streams=num, max_tokens=1))
            long_s, chunks = asyncio.run(
                measure(subject, path, num_streams=num, max_tokens=options.tokens)
            )
            found[path] = {
                "chunks": chunks,
                "server_cpu_s": round(long_s, 2),
                "us_per_chunk": round(long_s / chunks * 1e6, 1),
                "us_per_request": round(short_s / num * 1e6),
            }
    document = {
        "provenance": provenance.collect(device="cpu"),
        "streams": num,
        "tokens_of_a_stream": options.tokens,
        "paths": found,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
