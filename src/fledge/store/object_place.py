"""A prefix of S3, Google Cloud Storage or Azure, as a place that stages write to and read from.

The client tries requests again by itself where that is safe. It is not safe for `create`, whose
first try may have succeeded with its answer lost; here it is tried again all the same, and a file
that is then there already is for the caller to compare.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from fledge.store.object_lock import hold_lock
from fledge.store.object_store import explained, open_store, split_address
from fledge.store.place import Chunk, require_all

T = TypeVar("T")

_WHOLE_BYTES = 64 << 20
"""Up to here a file is one request, which can ask for a new file; beyond, it goes in parts."""

_PART_BYTES = 16 << 20
_MAX_TRIES = 5
_FIRST_PAUSE_S = 0.1
_LAST_TRY_S = 30
"""After which no new try begins: the client has tried long enough by itself."""


class ObjectPlace:
    """A directory in an object store."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._prefix = split_address(address).key.rstrip("/")
        with explained(self._address):
            self._store = open_store(self._address)

    def __str__(self) -> str:
        return self._address

    def file(self, name: str) -> str:
        return f"{self._address}/{name}"

    def locked(self) -> AbstractContextManager[None]:
        return hold_lock(self)

    def names(self) -> set[str]:
        listed = self._list()
        paths = [*(str(one["path"]) for one in listed["objects"]), *listed["common_prefixes"]]
        return {self._name(path) for path in paths}

    def sizes(self) -> dict[str, int]:
        found = {self._name(str(one["path"])): int(one["size"]) for one in self._list()["objects"]}
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes | None:
        found = self.read_version(name)
        return None if found is None else found[0]

    def read_version(self, name: str) -> tuple[bytes, Any] | None:
        """A small file, and what `replace_version` needs to know it again."""
        import obstore

        def get() -> tuple[bytes, Any] | None:
            try:
                found = obstore.get(self._store, self._key(name))
            except FileNotFoundError:
                return None
            version = {part: found.meta[part] for part in ("e_tag", "version")}
            known = {part: value for part, value in version.items() if value is not None}
            return bytes(found.bytes()), known

        with explained(self.file(name)):
            return _try_again(get)

    def read_range(self, name: str, start: int, length: int) -> memoryview:
        import obstore

        if not length:
            return memoryview(b"")
        with explained(self.file(name)):
            key = self._key(name)
            data = _try_again(
                lambda: obstore.get_range(self._store, key, start=start, length=length)
            )
        require_all(self.file(name), start, length, len(data))
        return memoryview(data)

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        data, at = self.read_range(name, start, sum(len(buffer) for buffer in buffers)), 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    def create(self, name: str, chunks: Sequence[Chunk]) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        key, size = self._key(name), sum(len(chunk) for chunk in chunks)

        def put_whole() -> bool:
            content = b"".join(chunks)
            try:
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        def put_parts() -> bool:
            # There is no way to ask for a new file here. The lock keeps other writers out, and a
            # file appears only when all of its parts are there.
            try:
                obstore.head(self._store, key)
            except FileNotFoundError:
                obstore.put(self._store, key, _parts(chunks), chunk_size=_PART_BYTES)
                return True
            return False

        with explained(self.file(name), "written"):
            return _try_again(put_whole if size <= _WHOLE_BYTES else put_parts)

    def replace(self, name: str, content: bytes) -> None:
        import obstore

        with explained(self.file(name), "written"):
            _try_again(lambda: obstore.put(self._store, self._key(name), content))

    def replace_version(self, name: str, content: bytes, version: Any) -> bool:
        """Write over one version of a file; False, with nothing changed, where it is another."""
        import obstore
        from obstore.exceptions import PreconditionError

        with explained(self.file(name), "written"):
            try:
                obstore.put(self._store, self._key(name), content, mode=version)
            except PreconditionError:
                return False
        return True

    def remove(self, name: str) -> None:
        import obstore

        def delete() -> None:
            try:
                obstore.delete(self._store, self._key(name))
            except FileNotFoundError:
                return

        with explained(self.file(name), "written"):
            _try_again(delete)

    def _list(self) -> Any:
        import obstore

        with explained(self._address):
            return _try_again(
                lambda: obstore.list_with_delimiter(self._store, self._prefix or None)
            )

    def _name(self, path: str) -> str:
        return path[len(self._prefix) + 1 if self._prefix else 0 :]

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def _parts(chunks: Sequence[Chunk]) -> Iterator[bytes]:
    """The same bytes in few, large pieces."""
    waiting: list[Chunk] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= _PART_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def _try_again(request: Callable[[], T]) -> T:
    """Make a request whose connection broke, or whose server stumbled, a few times more."""
    from obstore.exceptions import GenericError

    began, pause = time.monotonic(), _FIRST_PAUSE_S
    for _ in range(_MAX_TRIES - 1):
        try:
            return request()
        except GenericError:
            if time.monotonic() - began > _LAST_TRY_S:
                raise
        time.sleep(pause)
        pause *= 2
    return request()
