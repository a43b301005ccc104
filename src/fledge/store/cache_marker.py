"""`fledge.json` inside a cached target: what it was made from, and what it must look like.

It is written before the directory is published, so a published directory always has one. The check
looks at names and sizes only: cheap enough for every use, and enough to see a truncated file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

MARKER_NAME = "fledge.json"

FORMAT = 1
"""Raise it when the conversion changes: directories made before are then made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a cached target was made from."""

    source: str
    """Alias or file name, for people."""

    sha256: str
    """Of the file before conversion."""

    quantisation: str
    """How the weights were packed before conversion."""

    dtype: str = "float32"
    """How the weights are stored now."""


def write_marker(directory: Path, source: Source) -> None:
    """Record the source and the size of every file now in the directory."""
    files = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    record = {"format": FORMAT, **asdict(source), "files": files}
    (directory / MARKER_NAME).write_text(json.dumps(record, indent=2) + "\n")


def find_damage(directory: Path, sha256: str) -> str | None:
    """What is wrong with a cached target, in a phrase; None when nothing is."""
    record = _read_marker(directory / MARKER_NAME)
    if record is None:
        return f"{MARKER_NAME} is missing or unreadable"
    if record.get("format") != FORMAT:
        return f"it has format {record.get('format')}, this fledge writes {FORMAT}"
    if record.get("sha256") != sha256:
        return f"it was made from a file with sha256 {record.get('sha256')}, not {sha256}"
    files = record.get("files")
    if not isinstance(files, dict):
        return f"{MARKER_NAME} lists no files"
    return next((text for name in files if (text := _differs(directory, name, files[name]))), None)


def _read_marker(path: Path) -> dict[str, object] | None:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _differs(directory: Path, name: str, size: object) -> str | None:
    path = directory / name
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return None if found == size else f"{name} has {found} bytes instead of {size}"
