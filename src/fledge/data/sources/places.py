"""From the paths of a source to its files, wherever they are."""

import difflib
import glob
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fledge.contracts.errors import ArtifactError
from fledge.data.sources.file_names import DATA_SUFFIXES, fixed_part, has_wildcard, is_data_file


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a source; opening it may fetch it."""

    name: str
    """As rows name it: relative to the directory or pattern it was found by, or an address."""

    identity: str
    """Two paths of a recipe may lead to one file; it is read once."""

    size: int
    open: Callable[[], BinaryIO] = field(repr=False)


def find_local(path: str) -> list[SourceFile]:
    """A file, the data files below a directory, or what a pattern matches."""
    place = Path(path).expanduser()
    if place.is_file():
        return [_local(place, place.name)]
    if place.is_dir():
        found = [
            _local(file, file.relative_to(place).as_posix())
            for file in sorted(place.rglob("*"))
            if file.is_file() and is_data_file(file.relative_to(place).as_posix())
        ]
        if not found:
            raise ArtifactError(
                f"the directory {path} has no data files (names that end in "
                f"{', '.join(DATA_SUFFIXES)}, compressed or not)."
            )
        return found
    if has_wildcard(path):
        return _match(str(place))
    if place.exists():
        raise ArtifactError(f"{path} is neither a file nor a directory.")
    raise ArtifactError(f"there is no file or directory {path}.{_nearest(place)}")


def without_repeats(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    """Each file once, where it came first."""
    return tuple({file.identity: file for file in files}.values())


def _match(pattern: str) -> list[SourceFile]:
    base = Path(fixed_part(pattern) or ".")
    matched = sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207
    found = [_local(file, file.relative_to(base).as_posix()) for file in matched if file.is_file()]
    if not found:
        raise ArtifactError(f"no file matches {pattern}.")
    return found


def _local(file: Path, name: str) -> SourceFile:
    return SourceFile(
        name=name,
        identity=str(file.resolve()),
        size=file.stat().st_size,
        open=partial(_open_local, file),
    )


def _open_local(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror}.") from error


def _nearest(place: Path) -> str:
    if not place.parent.is_dir():
        return f" There is no directory {place.parent} either."
    names = [entry.name for entry in place.parent.iterdir()]
    near = difflib.get_close_matches(place.name, names, n=1)
    return f" Did you mean {place.parent / near[0]}?" if near else ""
