"""A directory of this machine, as a place that stages write to and read from."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fledge.contracts.errors import ArtifactError
from fledge.store.cache_publish import flush
from fledge.store.capacity import translated_disk_errors
from fledge.store.place import LOCK_NAME, Chunk, require_all

_CHUNKS_AT_ONCE = 512
"""Linux takes 1024."""


class LocalPlace:
    """A directory of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def file(self, name: str) -> str:
        return str(self.path / name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with translated_disk_errors(self.path, place="output"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK_NAME).open("a")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ArtifactError(
                    f"another fledge process is writing {self.path}; wait for it, or choose "
                    "another directory."
                ) from error
            yield

    def names(self) -> set[str]:
        return {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()

    def sizes(self) -> dict[str, int]:
        if not self.path.is_dir():
            return {}
        files = (path for path in self.path.iterdir() if path.is_file())
        return {path.name: path.stat().st_size for path in sorted(files)}

    def read(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error

    def read_range(self, name: str, start: int, length: int) -> memoryview:
        with self._opened(name) as handle:
            data = _read_all(handle, start, length)
        require_all(self.file(name), start, length, len(data))
        return memoryview(data)

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        length = sum(len(buffer) for buffer in buffers)
        with self._opened(name) as handle:
            found = _fill_all(handle, start, buffers)
        require_all(self.file(name), start, length, found)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        # Read, not mapped: a bad disk is then an error and no dead process, and threads that wait
        # for the disk let others run.
        path = self.path / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield handle
            finally:
                os.close(handle)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{path} is not there (any more). Bring it back or make it again, then "
                "repeat this command."
            ) from error
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error

    def create(self, name: str, chunks: Sequence[Chunk]) -> bool:
        # Whoever writes holds the lock of the directory, so nobody else makes the file meanwhile.
        if (self.path / name).exists():
            return False
        self._publish(name, chunks)
        return True

    def replace(self, name: str, content: bytes) -> None:
        self._publish(name, [content])

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def _publish(self, name: str, chunks: Sequence[Chunk]) -> None:
        final, temporary = self.path / name, self.path / f".{name}.tmp"
        with translated_disk_errors(self.path, place="output"):
            try:
                with temporary.open("wb", buffering=0) as file:
                    _write_all(file.fileno(), chunks)
                    os.fsync(file.fileno())
                temporary.replace(final)
            except BaseException:
                # What is half made must not fill the disk until the next run.
                temporary.unlink(missing_ok=True)
                raise
            flush(self.path)


def _read_all(handle: int, start: int, length: int) -> bytes:
    data = os.pread(handle, length, start)
    # Linux hands out at most 2 GB at once.
    while len(data) < length and (more := os.pread(handle, length - len(data), start + len(data))):
        data += more
    return data


def _fill_all(handle: int, start: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers as far as the file goes; returns how many bytes that was."""
    waiting, filled = list(buffers), 0
    while waiting and (count := os.preadv(handle, waiting, start + filled)):
        filled += count
        waiting = _rest(waiting, count)
    return filled


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind so many bytes."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    rest = buffers[done:]
    if count:
        rest[0] = rest[0][count:]
    return rest


def _write_all(handle: int, chunks: Sequence[Chunk]) -> None:
    # Many small arrays in one call: a shard of short samples has tens of thousands of them.
    for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
        waiting = [memoryview(chunk) for chunk in chunks[start : start + _CHUNKS_AT_ONCE]]
        while waiting:
            waiting = _rest(waiting, os.writev(handle, waiting))
