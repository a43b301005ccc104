"""Opening S3, Google Cloud Storage and Azure; needs the extra `cloud`.

Credentials, region and endpoint come from environment variables as the providers' own tools name
them, such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS and
AZURE_STORAGE_ACCOUNT_NAME.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError, FledgeError

SCHEMES = ("s3", "gs", "az")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_RETRIES = {
    "max_retries": 10,
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=15),
        "base": 2,
    },
    "retry_timeout": timedelta(minutes=3),
}


class ObjectAddress(NamedTuple):
    """`s3://bucket/key`, taken apart."""

    scheme: str
    bucket: str
    key: str


def is_object_address(address: str) -> bool:
    return address.partition("://")[0] in SCHEMES


def split_address(address: str) -> ObjectAddress:
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{address!r} names no bucket; write {scheme}://bucket/name.")
    return ObjectAddress(scheme, bucket, key)


def open_store(address: str) -> Any:
    """The bucket of an address, as obstore sees it; requests that fail are tried again."""
    scheme, bucket, _ = split_address(address)
    try:
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as error:
        raise ConfigError(f"{address} needs obstore: pip install 'fledge[cloud]'.") from error
    endpoints = [os.environ.get(name, "") for name in _ENDPOINTS[scheme]]
    # Plain HTTP is for servers of one's own; whoever names one in the environment wants it.
    is_plain = any(endpoint.startswith("http://") for endpoint in endpoints)
    options: Any = {"allow_http": True} if is_plain else None
    stores: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return stores[scheme](bucket, client_options=options, retry_config=_RETRIES)


@contextmanager
def explained(address: str, action: Literal["read", "written"] = "read") -> Iterator[None]:
    """Errors of the store as sentences."""
    try:
        yield
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{address} is not there (any more). Bring it back or make it again, then "
            "repeat this command."
        ) from error
    except FledgeError:
        raise
    except Exception as error:
        # obstore's own errors; which of them comes depends on its version.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(
            f"{address} cannot be {action}: {reason[:400]}. Check the address, the network, and "
            "the credentials and endpoint in the environment."
        ) from error
