"""Files and batches on disk. One server at a time holds the directory.

    lock                   held while a server runs
    files/<id>.data        what was uploaded, or the results of a batch while it runs and after
    files/<id>.json        whose it is; without it the file does not exist for anybody
    batches/<id>.json      a batch and its status
    uploads/               files on their way in

Names on disk are ids that were made here: nothing that a client sends becomes part of a path. The
small files appear whole or not at all. Everything is known in memory; callers of `save_*` and
`remove_*` have changed what is known already, or do so by them.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from fledge.contracts.batch_settings import BatchSettings
from fledge.contracts.errors import ConfigError
from fledge.server.api_errors import (
    BodyTooLargeError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from fledge.server.batch_records import BatchRecord, StoredFile
from fledge.store.cache_publish import flush, publish_file
from fledge.store.capacity import format_bytes

_log = logging.getLogger(__name__)

R = TypeVar("R", StoredFile, BatchRecord)
_NAME = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_DAY_S = 86_400


class BatchStore:
    """All files and batches of one server."""

    def __init__(self, directory: Path, settings: BatchSettings) -> None:
        self.settings = settings
        self._files_dir = directory / "files"
        self._batches_dir = directory / "batches"
        self._uploads_dir = directory / "uploads"
        self._lock = _take(directory, (self._files_dir, self._batches_dir, self._uploads_dir))
        self._saving = asyncio.Lock()
        self._uploading: list[int] = []
        """Sizes of the files on their way in."""

        self.files = _load(self._files_dir, lambda document: StoredFile(**document))
        self.batches = _load(self._batches_dir, BatchRecord.from_plain)
        self._remove_leftovers()

    def close(self) -> None:
        self._lock.close()

    def _remove_leftovers(self) -> None:
        """What a killed server was writing, and results of batches that are no more."""
        for part in self._uploads_dir.iterdir():
            part.unlink()
        results = {name for one in self._running for name in (one.output_name, one.error_name)}
        for path in self._files_dir.iterdir():
            if path.stem not in results and not path.with_suffix(".json").exists():
                path.unlink()

    def data_path(self, name: str) -> Path:
        assert _NAME.fullmatch(name), name
        return self._files_dir / f"{name}.data"

    def upload_path(self, name: str) -> Path:
        assert _NAME.fullmatch(name), name
        return self._uploads_dir / f"{name}.part"

    def file(self, owner: str, file_id: str) -> StoredFile:
        found = self.files.get(file_id)
        if found is None or found.owner != owner or found.expires_at <= time.time():
            raise NotFoundError(f"there is no file {file_id!r}.", param="file_id")
        return found

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        found = self.batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"there is no batch {batch_id!r}.", param="batch_id")
        return found

    def files_of(self, owner: str) -> list[StoredFile]:
        """Newest first."""
        now = time.time()
        return _newest_first(
            one for one in self.files.values() if one.owner == owner and one.expires_at > now
        )

    def batches_of(self, owner: str) -> list[BatchRecord]:
        """Newest first."""
        return _newest_first(one for one in self.batches.values() if one.owner == owner)

    @asynccontextmanager
    async def room_for(self, num_bytes: int) -> AsyncIterator[None]:
        """Room for a file while it is uploaded; refuses one that is one too many, or too much."""
        self._uploading.append(num_bytes)
        try:
            await self._check_room()
            yield
        finally:
            self._uploading.remove(num_bytes)

    async def _check_room(self) -> None:
        limits = self.settings
        if len(self.files) + len(self._uploading) > limits.max_files:
            raise BodyTooLargeError(
                f"this server keeps at most {limits.max_files} files and has as many; delete some.",
                code="storage_full",
            )
        used = await asyncio.to_thread(self._kept_bytes)
        if used + sum(self._uploading) > limits.max_total_bytes:
            raise BodyTooLargeError(
                f"the files of this server take {format_bytes(used)} of at most "
                f"{format_bytes(limits.max_total_bytes)}; delete some.",
                code="storage_full",
            )

    def _kept_bytes(self) -> int:
        total = 0
        with os.scandir(self._files_dir) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    total += entry.stat().st_size
        return total

    def require_room_for_batch(self) -> None:
        if len(self.batches) >= self.settings.max_files:
            raise BodyTooLargeError(
                f"this server remembers at most {self.settings.max_files} batches and has as many; "
                "wait until old ones are forgotten.",
                code="storage_full",
            )

    async def adopt(self, file: StoredFile) -> None:
        """An upload that is whole becomes a file."""
        await asyncio.to_thread(self._adopt, file)
        self.files[file.id] = file

    def _adopt(self, file: StoredFile) -> None:
        part, path = self.upload_path(file.id), self.data_path(file.id)
        flush(part)
        part.replace(path)
        flush(path.parent)
        self._publish(self._files_dir, file)

    async def publish(self, file: StoredFile) -> None:
        """Data that is on the disk already becomes a file."""
        await asyncio.to_thread(self._publish, self._files_dir, file)
        self.files[file.id] = file

    async def save(self, batch: BatchRecord) -> None:
        """Remember a batch as it is now."""
        async with self._saving:
            self.batches[batch.id] = batch
            await asyncio.to_thread(self._publish, self._batches_dir, batch)

    def _publish(self, directory: Path, record: StoredFile | BatchRecord) -> None:
        content = json.dumps(record.to_plain()).encode()
        publish_file(directory / f"{record.id}.json", content)

    def remove_empty_results(self, batch: BatchRecord) -> None:
        """Of the two files that a batch began, one is often empty."""
        for name in {batch.output_name, batch.error_name} - {
            batch.output_file_id,
            batch.error_file_id,
        }:
            self.data_path(name).unlink(missing_ok=True)

    async def delete(self, file: StoredFile) -> None:
        """Forget a file that no batch needs."""
        user = next((one for one in self._running if one.input_file_id == file.id), None)
        if user is not None:
            raise ConflictError(
                f"batch {user.id} still reads file {file.id}; cancel it, or wait until it is over.",
                code="file_in_use",
            )
        if self.files.pop(file.id, None) is not None:
            await asyncio.to_thread(self._unlink_file, file.id)

    def _unlink_file(self, file_id: str) -> None:
        # In this order: data without a description is removed at the next start.
        (self._files_dir / f"{file_id}.json").unlink(missing_ok=True)
        self.data_path(file_id).unlink(missing_ok=True)

    @property
    def _running(self) -> Iterable[BatchRecord]:
        return (one for one in self.batches.values() if not one.is_over)

    async def sweep(self) -> None:
        """Remove what was kept long enough."""
        now = time.time()
        needed = {one.input_file_id for one in self._running}
        for file in [one for one in self.files.values() if one.expires_at <= now]:
            if file.id not in needed:
                await self.delete(file)
        oldest = now - self.settings.keep_days * _DAY_S
        for batch in [one for one in self.batches.values() if one.is_over]:
            if max(batch.moments.values(), default=batch.created_at) < oldest:
                del self.batches[batch.id]
                path = self._batches_dir / f"{batch.id}.json"
                await asyncio.to_thread(path.unlink, missing_ok=True)

    @property
    def keep_s(self) -> int:
        return int(self.settings.keep_days * _DAY_S)


def page_of(found: list[R], *, after: str | None, limit: int) -> dict[str, Any]:
    """A part of a list, as the API shows it."""
    start = 0
    if after is not None:
        ids = [one.id for one in found]
        if after not in ids:
            raise InvalidRequestError(f"the list has no {after!r} to go on after.", param="after")
        start = ids.index(after) + 1
    shown = found[start : start + limit]
    return {
        "object": "list",
        "data": [one.public for one in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(found),
    }


def _newest_first(records: Iterable[R]) -> list[R]:
    # Within a second the later one comes first too: what is kept keeps its order.
    return sorted(records, key=lambda one: one.created_at)[::-1]


def _take(directory: Path, folders: Iterable[Path]) -> IO[str]:
    """Make the directory and hold its lock."""
    try:
        for folder in (directory, *folders):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"files of batches cannot be kept in {directory}: {error.strerror}; choose another "
            "--batch-dir."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            f"another server keeps the files of its batches in {directory}; choose another "
            "--batch-dir."
        ) from error
    return lock


def _load(directory: Path, read: Callable[[dict[str, Any]], R]) -> dict[str, R]:
    """Everything that is described, oldest first; what cannot be read is left alone, and named."""
    found: list[R] = []
    for path in directory.glob("*.json"):
        try:
            record = read(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("%s cannot be read and is left out: %s", path, error)
            continue
        if record.id == path.stem and _NAME.fullmatch(record.id):
            found.append(record)
    return {one.id: one for one in sorted(found, key=lambda one: one.created_at)}
