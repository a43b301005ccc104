"""A file as a stream of byte chunks: decompressed, and in UTF-8 whatever Unicode it was written in.

What a file is, is seen by its first bytes; its name does not matter. Every chunk is small, also
when a few bytes stand for gigabytes.
"""

import bz2
import codecs
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, BinaryIO

import zstandard

from fledge.contracts.errors import ArtifactError
from fledge.data.sources.problems import StreamProblem

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 18
"""So much of a file is looked at to see what it is."""

_ZSTD_STEP_BYTES = 1 << 10
"""zstandard has no limit on what one call yields; 1 kB of input stands for 32 MB at most."""


class _ZstdPart:
    """A zstd frame, read like the other compressions: little by little."""

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self.eof = False
        self.unused_data = b""
        self.unconsumed_tail = memoryview(b"")

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        del max_length
        rest = memoryview(data)
        expanded = self._frame.decompress(rest[:_ZSTD_STEP_BYTES])
        self.eof = self._frame.eof
        rest = rest[_ZSTD_STEP_BYTES:]
        if self.eof:
            self.unused_data = self._frame.unused_data + bytes(rest)
        self.unconsumed_tail = memoryview(b"") if self.eof else rest
        return expanded


_MAX_NULL_SHARE = 0.2
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins like that of UTF-16, so it comes first
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
_COMPRESSIONS: tuple[tuple[re.Pattern[bytes], str, Callable[[], Any]], ...] = (
    (re.compile(rb"\x1f\x8b"), "gzip", lambda: zlib.decompressobj(wbits=31)),
    # All of it, since a prompt may begin with its first letters.
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "bzip2", bz2.BZ2Decompressor),
    (re.compile(rb"\xfd7zXZ\x00"), "xz", lzma.LZMADecompressor),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "zstd", _ZstdPart),
)


def read_chunks(stream: BinaryIO, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes as they are stored; `on_bytes` is told how many came."""
    while chunk := stream.read(CHUNK_BYTES):
        on_bytes(len(chunk))
        yield chunk


def as_text(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Decompressed if need be, without a byte order mark, in UTF-8."""
    head, chunks = take_head(chunks)
    for magic, kind, start in _COMPRESSIONS:
        if magic.match(head):
            head, chunks = take_head(_decompress(chunks, kind, start))
            break
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            stripped = _drop(chunks, len(mark))
            return stripped if encoding == "utf-8" else _to_utf8(stripped, encoding)
    if head.startswith(b"PAR1"):
        raise ArtifactError(f"{name} is a compressed parquet file; decompress it first.")
    if head.count(0) > _MAX_NULL_SHARE * len(head):
        raise ArtifactError(
            f"{name} is not text: it is full of null bytes. If it is UTF-16 without a byte order "
            "mark, convert it to UTF-8; otherwise it is binary or damaged."
        )
    return chunks


def take_head(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, and all chunks again; damage behind them shows when it is reached."""
    taken: list[bytes] = []
    num_bytes = 0
    try:
        while num_bytes < HEAD_BYTES and (chunk := next(chunks, None)) is not None:
            taken.append(chunk)
            num_bytes += len(chunk)
    except StreamProblem as problem:
        return b"".join(taken)[:HEAD_BYTES], _then_raise(taken, problem)
    return b"".join(taken)[:HEAD_BYTES], chain(taken, chunks)


def _then_raise(taken: list[bytes], problem: StreamProblem) -> Iterator[bytes]:
    yield from taken
    raise problem


def _drop(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk[count:]
        count = max(0, count - len(chunk))


def _to_utf8(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    for chunk in chain(chunks, [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise StreamProblem(
                "damaged file", f"the file is damaged here: {encoding} text with {error.reason}"
            ) from error
        yield text.encode()


def _decompress(chunks: Iterator[bytes], kind: str, start: Callable[[], Any]) -> Iterator[bytes]:
    """Of files made of several compressed parts, too."""
    part = start()
    for chunk in chunks:
        data = chunk
        while data:
            if part.eof:
                if not data.strip(b"\0"):
                    break  # padding
                part = start()
            yield from _expand(part, kind, data)
            data = part.unused_data if part.eof else b""
    if not part.eof:
        raise StreamProblem("damaged file", f"the file is cut off here: its {kind} data has no end")


def _expand(part: Any, kind: str, data: bytes) -> Iterator[bytes]:
    """What a piece of compressed data stands for, in chunks of limited size."""
    rest: bytes | memoryview = data
    while True:
        try:
            expanded = part.decompress(rest, CHUNK_BYTES)
        except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
            raise StreamProblem(
                "damaged file", f"the file is damaged here: its {kind} data is wrong ({error})"
            ) from error
        if expanded:
            yield expanded
        # zlib hands back what it did not take, the others keep it.
        rest = getattr(part, "unconsumed_tail", b"")
        if part.eof or (not rest and len(expanded) < CHUNK_BYTES):
            return
