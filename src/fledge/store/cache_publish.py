"""A directory or a file appears under its name whole or not at all.

It is written into a hidden sibling, flushed to the disk, and renamed. Callers hold the lock of the
directory, so every other hidden sibling belongs to a run that died and may be removed.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def publish_directory(final: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `final` when the block ends well."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        _flush_tree(temporary)
        _take_place(temporary, final)
    except BaseException:
        # Ctrl-C too: what is half made must not fill the disk until the next run.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(final.parent)


def publish_file(path: Path, content: bytes) -> None:
    """Write a file that takes its name when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_place(temporary: Path, final: Path) -> None:
    if not final.exists():
        temporary.rename(final)
        return
    # A directory cannot be renamed over a full one. A kill between the two renames leaves nothing
    # under the name, which the next run sees as "not made yet".
    retired = final.with_name(f".{final.name}.{os.getpid()}.old")
    final.rename(retired)
    temporary.rename(final)
    shutil.rmtree(retired, ignore_errors=True)


def _remove_leftovers(final: Path) -> None:
    # A process id between the name and the ending, so that `head` leaves `head.v2` alone.
    pattern = re.compile(rf"\.{re.escape(final.name)}\.\d+\.(tmp|old)")
    for sibling in final.parent.iterdir():
        if pattern.fullmatch(sibling.name):
            shutil.rmtree(sibling, ignore_errors=True)


def _flush_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)
