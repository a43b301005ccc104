"""What prepare reads: paths of the recipe as paths on this machine, and what the files are."""

import glob
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fledge.contracts.data_settings import SELF, PrepareSettings, SourceSettings
from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress, Task
from fledge.data.sources import open_source
from fledge.data.sources.file_names import has_wildcard
from fledge.data.sources.places import SourceFile
from fledge.store.hashing import hash_part

_BENCHMARKS = "benchmarks"


def resolve_paths(settings: PrepareSettings, base: Path) -> PrepareSettings:
    """The settings with paths that are relative to `base`, the recipe's directory, made whole."""
    sources = tuple(
        replace(source, path=_resolved(source.path, base)) for source in settings.sources
    )
    against = _resolved(settings.decontaminate.against, base)
    return replace(
        settings, sources=sources, decontaminate=replace(settings.decontaminate, against=against)
    )


class Inputs(NamedTuple):
    """The files that a run reads."""

    fingerprints: dict[str, str]
    """sha256 of every local file; name, version and size of every other."""

    num_bytes: int
    """As they are stored."""


def check_inputs(settings: PrepareSettings, progress: Progress) -> Inputs:
    """Find the files of all sources and benchmarks, and read the local ones once."""
    benchmarks = [
        SourceSettings(name=_BENCHMARKS, path=(path,), licence="for measuring")
        for path in settings.decontaminate.against
    ]
    files = {
        f"{source.name}: {file.name}": file
        for source in (*settings.sources, *benchmarks)
        if not source.is_self
        for file in _files(settings, source, progress)
    }
    fingerprints = {}
    if files:
        local_bytes = sum(file.size for file in files.values() if _is_local(file))
        with progress.task("checking the inputs", local_bytes) as task:
            fingerprints = {name: _fingerprint(file, task) for name, file in files.items()}
    return Inputs(fingerprints, sum(file.size for file in files.values()))


def benchmark_names(fingerprints: Iterable[str]) -> list[str]:
    """The names of the benchmark files among those of all inputs."""
    start = f"{_BENCHMARKS}: "
    return [name.removeprefix(start) for name in fingerprints if name.startswith(start)]


def _is_local(file: SourceFile) -> bool:
    """Others are identified by an address, or by a repository and its commit."""
    return Path(file.identity).is_absolute()


def _fingerprint(file: SourceFile, task: Task) -> str:
    if not _is_local(file):
        return f"{file.identity}, {file.size} bytes"
    try:
        return hash_part(Path(file.identity), task)
    except OSError as error:
        raise ArtifactError(f"{file.identity} cannot be read: {error.strerror}.") from error


def _files(
    settings: PrepareSettings, source: SourceSettings, progress: Progress
) -> tuple[SourceFile, ...]:
    return open_source(
        source,
        on_bad_row=settings.on_bad_row,
        max_turn_chars=settings.max_turn_chars,
        progress=progress,
    ).files


def _resolved(paths: Iterable[str], base: Path) -> tuple[str, ...]:
    return tuple(path if path == SELF or "://" in path else _below(base, path) for path in paths)


def _below(base: Path, path: str) -> str:
    # In a pattern, brackets in the name of the recipe's own directory are no wildcards.
    start = Path(glob.escape(str(base))) if has_wildcard(path) else base
    return str(start / Path(path).expanduser())
