"""Is there room: checks before long work starts, and plain words when a disk fills up anyway."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fledge.contracts.errors import CapacityError, ConfigError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
)
_REMEDY = "Free some space, or set FLEDGE_CACHE to a directory on a larger disk."


def format_bytes(amount: int) -> str:
    """A size for people: `538.1 MB`."""
    size = float(amount)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def require_disk(path: Path, needed: int, what: str) -> None:
    """Refuse to start when the disk under `path` has less room than needed."""
    free = _free_bytes(path)
    if free < needed:
        raise CapacityError(
            f"not enough disk space for {what} in {path}: about {format_bytes(needed)} needed, "
            f"{format_bytes(free)} free. {_REMEDY}"
        )


def require_memory(needed: int, what: str) -> None:
    """Refuse to start when the machine has less memory available than needed."""
    available = _available_memory()
    if available is not None and available < needed:
        raise CapacityError(
            f"not enough memory for {what}: about {format_bytes(needed)} needed, "
            f"{format_bytes(available)} available. Close other programs, or choose a smaller "
            "target."
        )


@contextmanager
def translated_disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn a full or forbidden disk into an error a person can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise CapacityError(_full_text(path, needed, error)) from error
        if error.errno in _DENIED_ERRNOS:
            raise ConfigError(
                f"cannot write to the cache directory {path}: {_describe(error)}. "
                "Set FLEDGE_CACHE to a directory you may write to."
            ) from error
        raise


def _full_text(path: Path, needed: int | None, error: OSError) -> str:
    wanted = "" if needed is None else f"about {format_bytes(needed)} needed in all, "
    return (
        f"the disk is full or a size limit was reached while writing to {path}: "
        f"{_describe(error)} ({wanted}{format_bytes(_free_bytes(path))} free). {_REMEDY}"
    )


def _describe(error: OSError) -> str:
    text = error.strerror or os.strerror(error.errno or 0)
    return f"{text}: {error.filename}" if error.filename else text


def _free_bytes(path: Path) -> int:
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def _available_memory() -> int | None:
    """What the kernel says a new program may use; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
