"""One writer for a prefix of an object store: an object that is there while somebody writes.

It names its holder. A holder that died on this machine is known to be dead, and the lock is taken
over; one that died elsewhere is for the user to judge. The lock saves work, not data: shards are
created and never replaced, so that two writers at once could only do the same work twice.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fledge.contracts.errors import ArtifactError, FledgeError
from fledge.store.place import LOCK_NAME, Chunk


class Lockable(Protocol):
    """What a lock needs of an object store."""

    def file(self, name: str) -> str: ...

    def create(self, name: str, chunks: Sequence[Chunk]) -> bool: ...

    def read_version(self, name: str) -> tuple[bytes, Any] | None: ...

    def replace_version(self, name: str, content: bytes, version: Any) -> bool: ...

    def remove(self, name: str) -> None: ...


@contextmanager
def hold_lock(place: Lockable) -> Iterator[None]:
    """Hold the lock of a directory while the block runs."""
    mine = json.dumps(_describe_holder(), indent=2).encode()
    if not place.create(LOCK_NAME, [mine]):
        _take_over(place, mine)
    try:
        yield
    finally:
        # A store out of reach now has been reported, or all work is done; whoever comes next finds
        # this process dead.
        with suppress(FledgeError):
            found = place.read_version(LOCK_NAME)
            if found is not None and found[0] == mine:
                place.remove(LOCK_NAME)


def _take_over(place: Lockable, mine: bytes) -> None:
    found = place.read_version(LOCK_NAME)
    if found is None:
        raise _just_begun(place)
    content, version = found
    if content == mine:
        return  # made by a request whose answer was lost
    try:
        holder = dict(json.loads(content))
    except (ValueError, TypeError):
        holder = {}
    if not _is_dead(holder):
        who = f"process {holder.get('process')} on {holder.get('host')}"
        raise ArtifactError(
            f"another fledge process is writing {place}: {who}, since {holder.get('since')}. Wait "
            "for it, or choose another directory; if that process is no more, remove "
            f"{place.file(LOCK_NAME)} and run again."
        )
    if not place.replace_version(LOCK_NAME, mine, version):
        raise _just_begun(place)


def _just_begun(place: Lockable) -> ArtifactError:
    return ArtifactError(
        f"another fledge process has just begun or ended writing {place}; run again, or choose "
        "another directory."
    )


def _describe_holder() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "started": _start_time(os.getpid()),
        "nonce": os.urandom(8).hex(),
    }


def _machine() -> str | None:
    """This start of this machine, and the space that process ids are counted in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_time(process: int) -> str | None:
    """When a process began, in ticks since the machine did; None where there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # The program's name, in brackets, may hold anything; field 22 is counted from behind it.
    return text.rpartition(")")[2].split()[19]


def _is_dead(holder: dict[str, Any]) -> bool:
    machine = _machine()
    if machine is None or holder.get("machine") != machine:
        return False
    return bool(_start_time(holder["process"]) != holder["started"])
