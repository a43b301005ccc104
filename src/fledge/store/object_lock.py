"""One writer for a prefix of an object store: an object that is there while somebody writes.

It names its holder. A holder that died on this machine is known to be dead, and the lock is taken
over; one that died elsewhere is for the user to judge. The lock saves work, not data: shards are
created and never replaced, so that two writers at once could only do the same work twice.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.store.object_store import explained


@contextmanager
def locked_object(store: Any, key: str, file: str, directory: str) -> Iterator[None]:
    """Hold the lock at `key` while the block runs."""
    import obstore
    from obstore.exceptions import AlreadyExistsError

    mine = json.dumps(_describe_holder(), indent=2).encode()
    with explained(file, "written"):
        try:
            obstore.put(store, key, mine, mode="create")
        except AlreadyExistsError:
            _take_over(store, key, mine, file, directory)
    try:
        yield
    finally:
        with explained(file, "written"):
            if bytes(obstore.get(store, key).bytes()) == mine:
                obstore.delete(store, key)


def _take_over(store: Any, key: str, mine: bytes, file: str, directory: str) -> None:
    import obstore
    from obstore.exceptions import PreconditionError

    found = obstore.get(store, key)
    content = bytes(found.bytes())
    version: Any = {name: found.meta[name] for name in ("e_tag", "version")}
    if content == mine:
        return  # written by a request whose answer was lost
    try:
        holder = dict(json.loads(content))
    except (ValueError, TypeError):
        holder = {}
    who = f"process {holder.get('process')} on {holder.get('host')}, since {holder.get('since')}"
    if not _is_dead(holder):
        raise ArtifactError(
            f"another fledge process is writing {directory}: {who}. Wait for it, or choose another "
            f"directory; if that process is no more, remove {file} and run again."
        )
    try:
        obstore.put(store, key, mine, mode=version)
    except PreconditionError as error:
        raise ArtifactError(
            f"another fledge process has just begun to write {directory}; wait for it, or choose "
            "another directory."
        ) from error


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
    return _start_time(int(holder.get("process", 0))) != holder.get("started")
