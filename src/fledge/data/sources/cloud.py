"""Objects and prefixes of S3, Google Cloud Storage and Azure; needs the extra `cloud`.

Credentials, region and endpoint come from environment variables as the providers' own tools name
them, such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS and
AZURE_STORAGE_ACCOUNT_NAME. Objects are read in ranges, so a connection that breaks costs one range.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError
from fledge.data.sources.file_names import fixed_part, has_wildcard, is_data_file, matches
from fledge.data.sources.places import SourceFile

SCHEMES = ("s3", "gs", "az")
_RANGE_BYTES = 8 << 20
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def find_objects(address: str) -> list[SourceFile]:
    """One object, the data files below a prefix, or what a pattern matches."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{address!r} names no bucket; write {scheme}://bucket/name.")
    with _explained(address):
        store = _open_store(scheme, bucket, address)
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
        with _explained(self._address):
            data = obstore.get_range(self._store, self._path, start=self._at, length=length)
        buffer[: len(data)] = memoryview(data)
        self._at += len(data)
        return len(data)


def _open_store(scheme: str, bucket: str, address: str) -> Any:
    try:
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as error:
        raise ConfigError(
            f"reading {address} needs obstore: pip install 'fledge[cloud]'."
        ) from error
    endpoints = [os.environ.get(name, "") for name in _ENDPOINTS[scheme]]
    # Plain HTTP is for servers of one's own; whoever names one in the environment wants it.
    is_plain = any(endpoint.startswith("http://") for endpoint in endpoints)
    options: Any = {"allow_http": True} if is_plain else None
    stores: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return stores[scheme](bucket, client_options=options)


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Errors of the store as sentences."""
    try:
        yield
    except FileNotFoundError as error:
        raise ArtifactError(f"{address} is not there (any more).") from error
    except (ArtifactError, ConfigError, FetchError):
        raise
    except Exception as error:
        # obstore's own errors; which of them comes depends on its version.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(
            f"{address} cannot be read: {reason[:400]}. Check the address, the network, and the "
            "credentials and endpoint in the environment."
        ) from error
