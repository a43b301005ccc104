"""Answers on disk as they come, in one file that only grows.

    crc32 kind row before payload\\n

`payload` is JSON on one line; `before` is where the row's previous entry begins, -1 for none; the
checksum covers everything after it. An entry counts when its whole line is there and the checksum
fits. A process that is killed can only leave a line without its end, which the next run cuts off;
a line that a crash of the machine damaged is left out, and its row is asked again.

Each entry is handed to the operating system when it comes, so a killed process loses nothing. A
thread asks for the disk once a second (group commit), so a crash of the machine loses about the
last second. One process writes at a time: callers hold the lock of the directory.
"""

import contextlib
import json
import os
import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.store.cache_publish import flush
from fledge.store.capacity import translated_disk_errors
from fledge.store.manifest import encode_json

JOURNAL_NAME = "answers.journal"
COMMIT_EVERY_S = 1.0
NOWHERE = -1
"""The offset of an entry that does not exist."""

_HEADER = re.compile(rb"([a-z]+) (-?\d+) (-?\d+) ")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal; its payload is read when it is asked for."""

    offset: int
    kind: str
    row: int
    before: int
    text: bytes

    @property
    def payload(self) -> Any:
        return json.loads(self.text)


class Journal:
    """The journal of one directory, open for reading and appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with translated_disk_errors(path, place="output"):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._end = _end_of_last_line(self._handle)
            os.ftruncate(self._handle, self._end)
            flush(path.parent)
        self._reader = path.open("rb")
        self._is_dirty = self._end > 0  # what a killed run wrote may not be on the disk yet
        self._commit_error: OSError | None = None
        self._closing = threading.Event()
        self._committer = threading.Thread(target=self._commit_often, daemon=True)
        self._committer.start()

    def append(self, kind: str, row: int, before: int, payload: Any) -> int:
        """Write one entry; returns where it begins."""
        if self._commit_error is not None:
            with translated_disk_errors(self.path, place="output"):
                raise self._commit_error
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        body = b"%s %d %d %s" % (kind.encode(), row, before, encode_json(text))
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        offset = self._end
        with translated_disk_errors(self.path, place="output"):
            self._write(line)
        self._end += len(line)
        self._is_dirty = True
        return offset

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._handle, line[written:], self._end + written)
        except OSError:
            # Half a line would be cut off by the next run as well; this frees the space now.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
            raise

    def entries(self) -> Iterator[Entry | None]:
        """Every entry in the order they came; None stands for a damaged line."""
        return read_entries(self.path)

    def read(self, offset: int) -> Entry:
        """The entry that begins at an offset."""
        self._reader.seek(offset)
        entry = _parse(offset, self._reader.readline())
        if entry is None:
            raise ArtifactError(
                f"{self.path} changed at byte {offset} while it was used; run the command again, "
                "which asks for the damaged row once more."
            )
        return entry

    def commit(self) -> None:
        """Have the disk hold every entry."""
        if self._is_dirty:
            self._is_dirty = False
            os.fsync(self._handle)

    def _commit_often(self) -> None:
        while not self._closing.wait(COMMIT_EVERY_S):
            try:
                self.commit()
            except OSError as error:
                self._commit_error = error
                return

    def close(self) -> None:
        self._closing.set()
        self._committer.join()
        try:
            with translated_disk_errors(self.path, place="output"):
                self.commit()
        finally:
            self._reader.close()
            os.close(self._handle)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_entries(path: Path) -> Iterator[Entry | None]:
    """The entries of a journal that nobody needs to have open; a torn last line is left out."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _parse(offset, line)
            offset += len(line)


def _parse(offset: int, line: bytes) -> Entry | None:
    checksum, body = line[:8], line[9:-1]
    header = _HEADER.match(body)
    if header is None or checksum != b"%08x" % zlib.crc32(body):
        return None
    kind, row, before = header.groups()
    return Entry(offset, kind.decode(), int(row), int(before), body[header.end() :])


def _end_of_last_line(handle: int) -> int:
    """The length of the file without a torn last line."""
    end = os.fstat(handle).st_size
    chunk_bytes = 1 << 16
    while end > 0:
        start = max(0, end - chunk_bytes)
        position = os.pread(handle, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0
