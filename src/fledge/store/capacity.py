"""Is there room: checks before long work starts, and plain words when a disk fills up anyway."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fledge.contracts.errors import CapacityError, ConfigError

Place = Literal["cache", "output", "head"]
"""Whose directory it is: fledge's own cache, or one that the user named, for a stage's output that
grows and survives, or for a head that is written whole or not at all."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
)
_FULL_REMEDIES: dict[Place, str] = {
    "cache": "Free some space, or set FLEDGE_CACHE to a directory on a larger disk.",
    "output": "Free some space and run the same command again: it goes on where it stopped.",
    "head": "Free some space and run the same command again; nothing was kept.",
}
_SMALL_REMEDIES: dict[Place, str] = {
    "cache": _FULL_REMEDIES["cache"],
    "output": "Free some space, or choose an output directory on a larger disk.",
    "head": "Free some space, or choose a directory on a larger disk.",
}
_DENIED_TEXTS: dict[Place, tuple[str, str]] = {
    "cache": ("the cache directory ", "Set FLEDGE_CACHE to a directory you may write to."),
    "output": ("", "Choose a directory you may write to."),
    "head": ("", "Choose a directory you may write to."),
}


def format_bytes(amount: int) -> str:
    """A size for people: `538.1 MB`."""
    size = float(amount)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def require_disk(path: Path, needed: int, what: str, *, place: Place = "cache") -> None:
    """Refuse to start when the disk under `path` has less room than needed."""
    free = free_bytes(path)
    if free < needed:
        raise CapacityError(
            f"not enough disk space for {what} in {path}: about {format_bytes(needed)} needed, "
            f"{format_bytes(free)} free. {_SMALL_REMEDIES[place]}"
        )


def require_memory(needed: int, what: str) -> None:
    """Refuse to start when the machine has less memory available than needed."""
    available = available_memory()
    if available is not None and available < needed:
        raise CapacityError(
            f"not enough memory for {what}: about {format_bytes(needed)} needed, "
            f"{format_bytes(available)} available. Close other programs, or choose a smaller "
            "target."
        )


@contextmanager
def translated_disk_errors(
    path: Path, needed: int | None = None, *, place: Place = "cache"
) -> Iterator[None]:
    """Turn a full or forbidden disk into an error a person can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            full = _full_text(path, needed, error)
            raise CapacityError(f"{full} {_FULL_REMEDIES[place]}") from error
        if error.errno in _DENIED_ERRNOS:
            kind, remedy = _DENIED_TEXTS[place]
            raise ConfigError(
                f"cannot write to {kind}{path}: {_describe(error)}. {remedy}"
            ) from error
        raise


def _full_text(path: Path, needed: int | None, error: OSError) -> str:
    wanted = "" if needed is None else f"about {format_bytes(needed)} needed in all, "
    return (
        f"the disk is full or a size limit was reached while writing to {path}: "
        f"{_describe(error)} ({wanted}{format_bytes(free_bytes(path))} free)."
    )


def _describe(error: OSError) -> str:
    text = error.strerror or os.strerror(error.errno or 0)
    return f"{text}: {error.filename}" if error.filename else text


def free_bytes(path: Path) -> int:
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def num_cores() -> int:
    """Cores that this process may run on, which a container may limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def available_memory() -> int | None:
    """What the kernel says a new program may use; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
