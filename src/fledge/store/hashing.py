"""sha256 of files, with a memory for files that were hashed before."""

import hashlib
import json
from pathlib import Path

from fledge.contracts.progress import Progress, Task

CHUNK_BYTES = 1 << 20


def hash_file(path: Path, progress: Progress) -> str:
    """sha256 of a file, in hexadecimal."""
    with progress.task(f"checking {path.name}", path.stat().st_size) as task:
        return hash_part(path, task)


def hash_part(path: Path, task: Task) -> str:
    """The same as a part of a task over several files."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            task.advance(len(chunk))
    return digest.hexdigest()


def hash_file_once(path: Path, memory: Path, progress: Progress) -> str:
    """sha256 of a file; read from `memory` while the file's size, time and inode are the same."""
    path = path.resolve()
    status = path.stat()
    identity = [str(path), status.st_size, status.st_mtime_ns, status.st_ino]
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    note = memory / f"{name}.json"
    try:
        record = json.loads(note.read_text())
        if record["identity"] == identity:
            return str(record["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or half a note: hash again
    found = hash_file(path, progress)
    memory.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"identity": identity, "sha256": found}))
    return found
