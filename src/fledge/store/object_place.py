"""A prefix of S3, Google Cloud Storage or Azure, as a place that stages write to and read from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.store.object_lock import locked_object
from fledge.store.object_store import explained, open_store, split_address
from fledge.store.place import LOCK_NAME, Chunk, require_all

_WHOLE_PUT_BYTES = 32 << 20
_MULTIPART_BYTES = 16 << 20


class ObjectPlace:
    """A prefix of S3, Google Cloud Storage or Azure."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._prefix = split_address(self._address).key
        with explained(self._address):
            self._store = open_store(self._address)

    def __str__(self) -> str:
        return self._address

    def file(self, name: str) -> str:
        return f"{self._address}/{name}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        with locked_object(self._store, self._key(LOCK_NAME), self.file(LOCK_NAME), str(self)):
            yield

    def names(self) -> set[str]:
        return {*self.sizes(), *(self._name(one) for one in self._list()["common_prefixes"])}

    def sizes(self) -> dict[str, int]:
        found = {self._name(str(one["path"])): int(one["size"]) for one in self._list()["objects"]}
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes | None:
        import obstore

        with explained(self.file(name)):
            try:
                return bytes(obstore.get(self._store, self._key(name)).bytes())
            except FileNotFoundError:
                return None

    def read_range(self, name: str, start: int, length: int) -> NDArray[np.uint8]:
        import obstore

        if not length:
            return np.empty(0, np.uint8)
        with explained(self.file(name)):
            data = obstore.get_range(self._store, self._key(name), start=start, length=length)
        require_all(self.file(name), start, length, len(data))
        return np.frombuffer(memoryview(data), np.uint8)

    def create(self, name: str, chunks: Sequence[Chunk]) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with explained(self.file(name), "written"):
            try:
                content = b"".join(chunks)
                obstore.put(
                    self._store, self._key(name), content, mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                return False
        return True

    def replace(self, name: str, content: bytes) -> None:
        import obstore

        with explained(self.file(name), "written"):
            obstore.put(self._store, self._key(name), content)

    def remove(self, name: str) -> None:
        import obstore

        with explained(self.file(name), "written"), suppress(FileNotFoundError):
            obstore.delete(self._store, self._key(name))

    def _list(self) -> Any:
        import obstore

        with explained(self._address):
            return obstore.list_with_delimiter(self._store, self._prefix or None)

    def _name(self, path: str) -> str:
        return path[len(self._prefix) + 1 if self._prefix else 0 :]

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name
