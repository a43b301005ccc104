"""The finished lines of a batch: written as they come, and found again after a kill.

They are written in the format in which clients read them, answers into one file and errors into
another. A line is handed to the operating system whole when it is finished, so that a killed server
loses none of them; the disk is asked once a second, so that a crash of the machine loses about
that much. A torn last line, or one that a crash damaged, is cut out when the files are opened
again.
"""

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fledge.server.api_errors import dump
from fledge.server.batch_records import BatchRecord


class BatchResults:
    """The two files of one batch, open for appending; counts what they hold in its record."""

    def __init__(self, record: BatchRecord, output: Path, errors: Path) -> None:
        self._record = record
        record.num_completed = record.num_failed = 0
        record.usage = type(record.usage)()
        self._done: set[str] = set()
        self._output = _GrowingFile(output)
        self._errors = _GrowingFile(errors)
        for result in [*self._output.take_kept(), *self._errors.take_kept()]:
            self._count(result)

    def is_done(self, custom_id: str) -> bool:
        return custom_id in self._done

    @property
    def has_answers(self) -> bool:
        return self._output.num_bytes > 0

    @property
    def has_errors(self) -> bool:
        return self._errors.num_bytes > 0

    @property
    def sizes(self) -> tuple[int, int]:
        return self._output.num_bytes, self._errors.num_bytes

    def add(self, result: dict[str, Any]) -> None:
        """A line is finished; raises OSError when it could not be written."""
        file = self._output if _is_answer(result) else self._errors
        file.append(dump(result) + b"\n")
        self._count(result)

    def _count(self, result: dict[str, Any]) -> None:
        record = self._record
        if result["custom_id"] in self._done:
            return
        self._done.add(result["custom_id"])
        if _is_answer(result):
            record.num_completed += 1
            record.usage.add(result["response"]["body"]["usage"])
        else:
            record.num_failed += 1

    def commit(self) -> None:
        """Have the disk hold every line."""
        self._output.commit()
        self._errors.commit()

    def close(self) -> None:
        self._output.close()
        self._errors.close()


def answered(custom_id: str, request_id: str, status: int, body: Any) -> dict[str, Any]:
    """The result of a request that was made."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _new_id(), "custom_id": custom_id, "response": response, "error": None}


def unasked(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The result of a request that was never made."""
    error = {"code": code, "message": message}
    return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def _is_answer(result: dict[str, Any]) -> bool:
    response = result["response"]
    return response is not None and response["status_code"] == 200


class _GrowingFile:
    """A file of JSON lines, without what is torn or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[dict[str, Any]] = []
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.num_bytes = self._repair()
        self._is_dirty = self.num_bytes > 0
        self._closing = threading.Lock()

    def take_kept(self) -> list[dict[str, Any]]:
        """Results of an earlier server, once."""
        kept, self._kept = self._kept, []
        return kept

    def _repair(self) -> int:
        """Read what is there; returns where the next line goes."""
        seen: set[str] = set()
        position = offset = 0
        for line in _lines_of(self._path):
            result = _parse(line)
            if result is not None and result["custom_id"] not in seen:
                seen.add(result["custom_id"])
                if position < offset:  # something before it was cut out
                    _write_all(self._handle, line, position)
                position += len(line)
                self._kept.append(result)
            offset += len(line)
        os.ftruncate(self._handle, position)
        return position

    def append(self, line: bytes) -> None:
        try:
            _write_all(self._handle, line, self.num_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self.num_bytes)
            raise
        self.num_bytes += len(line)
        self._is_dirty = True

    def commit(self) -> None:
        with self._closing:
            if self._is_dirty and self._handle >= 0:
                self._is_dirty = False
                os.fsync(self._handle)

    def close(self) -> None:
        with self._closing:
            os.close(self._handle)
            self._handle = -1


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _parse(line: bytes) -> dict[str, Any] | None:
    """A result that is whole, with what is counted of it."""
    if not line.endswith(b"\n"):
        return None
    try:
        result = json.loads(line)
        if _is_answer(result):
            result["response"]["body"] = {"usage": result["response"]["body"]["usage"]}
        return result if isinstance(result["custom_id"], str) else None
    except (ValueError, TypeError, KeyError):
        return None


def _write_all(handle: int, data: bytes, position: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(handle, data[written:], position + written)
