"""What prepare would read and write, from a sample of each source: rows, bytes, disk, time."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.data_settings import PrepareSettings, SourceSettings
from fledge.contracts.progress import Progress, SilentProgress
from fledge.data.blend import count_blend
from fledge.data.duplicates import DuplicateIndex
from fledge.data.filtering import Filters
from fledge.data.inputs import resolve_paths
from fledge.data.sources import open_source
from fledge.data.tally import SourceTally
from fledge.store.capacity import free_bytes, require_disk
from fledge.store.rows import row_line

_FILTERED_ROWS = 1000
"""Rows of a source that go through the filters, to see what is kept and how long it takes."""

_READ_BYTES = 8 << 20
"""So much of a source is read, to see how many bytes a row takes as it is stored. Files are read in
chunks of a megabyte, which the estimate cannot be finer than."""

_SELF_ROW_BYTES = 400
"""A prompt that a target writes, with its origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEstimate:
    """What one source would give."""

    name: str
    licence: str
    files: int
    stored_bytes: int
    rows: int
    is_exact: bool
    """The source is so small that all of it was read."""

    kept: int
    kept_bytes: int
    seconds: float | None
    """None for prompts that the target writes: that depends on the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareEstimate:
    """What a whole run would read and write."""

    sources: tuple[SourceEstimate, ...]
    index_bytes_per_row: float
    index_bytes: int
    work_bytes: int
    """Kept rows before they are blended."""

    output_rows: int
    output_bytes: int
    needed_bytes: int
    """On disk while it runs: index, work and output together, less what is there already."""

    free_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_prepare(
    settings: PrepareSettings, out: Path, *, base: Path, progress: Progress
) -> PrepareEstimate:
    """Read a part of every source, filter a part of that, and extrapolate."""
    resolved = resolve_paths(settings, base)
    with _scratch_filters(resolved, progress) as filters:
        sources = [_estimate_source(resolved, source, filters) for source in resolved.sources]
        bytes_per_row = filters.index.bytes_per_row
    kept = [source.kept for source in sources]
    taken = count_blend(settings, kept)
    shares = [taken[i] / kept[i] if kept[i] else 0.0 for i in range(len(kept))]
    work = sum(source.kept_bytes for source in sources)
    output = sum(round(s.kept_bytes * share) for s, share in zip(sources, shares, strict=True))
    index = round(bytes_per_row * sum(kept))
    return PrepareEstimate(
        sources=tuple(sources),
        index_bytes_per_row=round(bytes_per_row, 1),
        index_bytes=index,
        work_bytes=work,
        output_rows=sum(taken),
        output_bytes=output,
        needed_bytes=max(0, index + work + output - _bytes_below(out)),
        free_bytes=free_bytes(out),
        seconds=round(sum(source.seconds or 0.0 for source in sources), 1),
    )


def require_room(estimate: PrepareEstimate, out: Path) -> None:
    """Refuse what the disk cannot hold."""
    require_disk(out, estimate.needed_bytes, "the rows and the index", place="output")


@contextmanager
def _scratch_filters(settings: PrepareSettings, progress: Progress) -> Iterator[Filters]:
    with (
        tempfile.TemporaryDirectory() as directory,
        DuplicateIndex(Path(directory) / "index.sqlite", settings.duplicates) as index,
    ):
        yield Filters.open(settings, index, progress)


def _estimate_source(
    settings: PrepareSettings, source: SourceSettings, filters: Filters
) -> SourceEstimate:
    if source.is_self:
        return _estimate_self(settings, source)
    reader = open_source(
        source,
        on_bad_row=settings.on_bad_row,
        max_turn_chars=settings.max_turn_chars,
        progress=SilentProgress(),
    )
    tally, kept_bytes, num_filtered, filter_s = SourceTally(), 0, 0, 0.0
    started, is_exact = time.perf_counter(), True
    for row in reader:
        if num_filtered < _FILTERED_ROWS:
            filter_started = time.perf_counter()
            kept = filters.passed(row, tally)
            kept_bytes += len(row_line(kept)) if kept is not None else 0
            filter_s += time.perf_counter() - filter_started
            num_filtered += 1
        elif reader.report.bytes_read >= _READ_BYTES:
            is_exact = False
            break
    read_s = time.perf_counter() - started - filter_s
    reader.close()
    filters.index.commit({})
    report, stored = reader.report, sum(file.size for file in reader.files)
    growth = 1.0 if is_exact else max(1.0, stored / max(1, report.bytes_read))
    good = report.rows_read - report.rows_bad
    per_filtered = good * growth / num_filtered if num_filtered else 0.0
    return SourceEstimate(
        name=source.name,
        licence=source.licence,
        files=len(reader.files),
        stored_bytes=stored,
        rows=round(report.rows_read * growth),
        is_exact=is_exact,
        kept=round(tally.kept * per_filtered),
        kept_bytes=round(kept_bytes * per_filtered),
        seconds=round(read_s * growth + filter_s * per_filtered, 1),
    )


def _estimate_self(settings: PrepareSettings, source: SourceSettings) -> SourceEstimate:
    rows = settings.self_prompts.rows
    return SourceEstimate(
        name=source.name,
        licence=source.licence,
        files=0,
        stored_bytes=0,
        rows=rows,
        is_exact=True,
        kept=rows,
        kept_bytes=rows * _SELF_ROW_BYTES,
        seconds=None,
    )


def _bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
