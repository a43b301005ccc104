"""A lock between processes: whoever makes something in the cache holds it meanwhile.

The kernel releases it when its holder dies, so a killed run blocks nobody. The file itself stays:
removing it would let two processes lock two different files of the same name.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fledge.contracts.progress import Progress


@contextmanager
def hold_lock(path: Path, *, what: str, progress: Progress) -> Iterator[None]:
    """Hold the lock at `path`; while another process has it, say so once and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if not _is_taken_at_once(file):
            progress.note(f"another fledge process is preparing {what}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_taken_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
