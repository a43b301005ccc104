"""Data files among the objects and prefixes of S3, Google Cloud Storage and Azure.

Objects are read in ranges, so a connection that breaks costs one range.
"""

import io
from functools import partial
from typing import Any, BinaryIO

from fledge.contracts.errors import ArtifactError
from fledge.data.sources.file_names import fixed_part, has_wildcard, is_data_file, matches
from fledge.data.sources.places import SourceFile
from fledge.store.object_store import explained, open_store, split_address

_RANGE_BYTES = 8 << 20


def find_objects(address: str) -> list[SourceFile]:
    """One object, the data files below a prefix, or what a pattern matches."""
    scheme, bucket, key = split_address(address)
    with explained(address):
        store = open_store(address)
        if has_wildcard(key):
            listed = _list(store, fixed_part(key))
            found = [one for one in listed if matches(one["path"], key)]
        else:
            found = _one_or_below(store, key)
    if not found:
        raise ArtifactError(
            f"there is nothing to read at {address}: no object of that name, and no data files "
            "below it."
        )
    return [_source_file(store, one, f"{scheme}://{bucket}") for one in found]


def _one_or_below(store: Any, key: str) -> list[Any]:
    import obstore

    if key and not key.endswith("/"):
        try:
            return [obstore.head(store, key)]
        except FileNotFoundError:
            pass
    prefix = key.rstrip("/")
    start = len(prefix) + 1 if prefix else 0
    return [one for one in _list(store, prefix) if is_data_file(one["path"][start:])]


def _list(store: Any, prefix: str) -> list[Any]:
    import obstore

    listed = (one for page in obstore.list(store, prefix or None) for one in page)
    return sorted(listed, key=lambda one: str(one["path"]))


def _source_file(store: Any, described: Any, root: str) -> SourceFile:
    address = f"{root}/{described['path']}"
    return SourceFile(
        name=address,
        identity=address,
        size=described["size"],
        open=partial(_open_object, store, described["path"], described["size"], address),
    )


def _open_object(store: Any, path: str, size: int, address: str) -> BinaryIO:
    return io.BufferedReader(_ObjectFile(store, path, size, address), _RANGE_BYTES)


class _ObjectFile(io.RawIOBase):
    """An object as a file that is fetched where it is read."""

    def __init__(self, store: Any, path: str, size: int, address: str) -> None:
        super().__init__()
        self._store, self._path, self._size, self._address = store, path, size, address
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        import obstore

        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        with explained(self._address):
            data = obstore.get_range(self._store, self._path, start=self._at, length=length)
        buffer[: len(data)] = memoryview(data)
        self._at += len(data)
        return len(data)
