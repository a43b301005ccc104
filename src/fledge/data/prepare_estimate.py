"""What prepare would read and write, from a sample of each source: rows, bytes, disk, time."""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fledge.contracts.data_settings import PrepareSettings, SourceSettings
from fledge.contracts.progress import Progress, SilentProgress
from fledge.data.blend import count_blend
from fledge.data.duplicates import DuplicateIndex
from fledge.data.examination import Examiner
from fledge.data.filtering import decide
from fledge.data.inputs import resolve_paths
from fledge.data.sources import SourceReader, open_source
from fledge.data.tally import SourceTally
from fledge.store.capacity import free_bytes, require_disk
from fledge.store.rows import row_line

_FILTERED_ROWS = 1000
"""Rows of a source that go through the filters, to see what is kept and how long it takes."""

_FILTER_S = 3.0
"""No longer than this, however slow the filters are."""

_READ_BYTES = 8 << 20
"""So much of a source is read, to see how many bytes a row takes as it is stored."""

_SELF_ROW_BYTES = 400
"""A prompt that a target writes, with its origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEstimate:
    """What one source would give."""

    name: str
    licence: str
    files: int
    schemas: dict[str, str]
    """What the files that were looked at are read as."""

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


class _Sample(NamedTuple):
    """What the beginning of a source showed."""

    kept: int
    kept_bytes: int
    num_filtered: int
    filter_s: float
    read_s: float
    is_whole: bool
    chunk_rows: int
    chunk_bytes: int
    """Rows of whole chunks, and their bytes as they are stored."""


def estimate_prepare(
    settings: PrepareSettings, out: Path, *, progress: Progress, base: Path = Path()
) -> PrepareEstimate:
    """Read a part of every source, filter a part of that, and extrapolate."""
    resolved = resolve_paths(settings, base)
    examiner = Examiner(resolved, progress)
    with (
        tempfile.TemporaryDirectory() as directory,
        DuplicateIndex(Path(directory) / "index.sqlite", settings.duplicates) as index,
    ):
        sources = [
            _estimate_source(resolved, source, examiner, index) for source in resolved.sources
        ]
        bytes_per_row = index.bytes_per_row
    kept = [source.kept for source in sources]
    taken = count_blend(settings, kept)
    shares = [taken[i] / kept[i] if kept[i] else 0.0 for i in range(len(kept))]
    work = sum(source.kept_bytes for source in sources)
    output = sum(round(s.kept_bytes * share) for s, share in zip(sources, shares, strict=True))
    index_bytes = round(bytes_per_row * sum(kept))
    return PrepareEstimate(
        sources=tuple(sources),
        index_bytes_per_row=round(bytes_per_row, 1),
        index_bytes=index_bytes,
        work_bytes=work,
        output_rows=sum(taken),
        output_bytes=output,
        needed_bytes=max(0, index_bytes + work + output - _bytes_below(out)),
        free_bytes=free_bytes(out),
        seconds=round(sum(source.seconds or 0.0 for source in sources), 1),
    )


def require_room(estimate: PrepareEstimate, out: Path) -> None:
    """Refuse what the disk cannot hold."""
    require_disk(out, estimate.needed_bytes, "the rows and the index", place="output")


def _estimate_source(
    settings: PrepareSettings, source: SourceSettings, examiner: Examiner, index: DuplicateIndex
) -> SourceEstimate:
    if source.is_self:
        return _estimate_self(settings, source)
    reader = open_source(
        source,
        on_bad_row=settings.on_bad_row,
        max_turn_chars=settings.max_turn_chars,
        progress=SilentProgress(),
    )
    sample = _read_sample(reader, examiner, index)
    report, stored = reader.report, sum(file.size for file in reader.files)
    rows = report.rows_read
    if not sample.is_whole:
        rows = round(stored / max(1, sample.chunk_bytes) * sample.chunk_rows)
    growth = rows / max(1, report.rows_read)
    per_row = (report.rows_read - report.rows_bad) * growth / max(1, sample.num_filtered)
    return SourceEstimate(
        name=source.name,
        licence=source.licence,
        files=len(reader.files),
        schemas={file: schema.sentence for file, schema in report.schemas.items()},
        stored_bytes=stored,
        rows=rows,
        is_exact=sample.is_whole,
        kept=round(sample.kept * per_row),
        kept_bytes=round(sample.kept_bytes * per_row),
        seconds=round(sample.read_s * growth + sample.filter_s * per_row, 1),
    )


def _read_sample(reader: SourceReader, examiner: Examiner, index: DuplicateIndex) -> _Sample:
    tally, kept_bytes, num_filtered, filter_s = SourceTally(), 0, 0, 0.0
    started, is_whole, report = time.perf_counter(), True, reader.report
    chunk_rows = chunk_bytes = seen_bytes = 0
    for row in reader:
        if report.bytes_read > seen_bytes:
            # The bytes of this chunk count already, its rows do not.
            chunk_rows, chunk_bytes, seen_bytes = report.rows_read, seen_bytes, report.bytes_read
        if num_filtered < _FILTERED_ROWS and filter_s < _FILTER_S:
            filter_started = time.perf_counter()
            for examined in examiner.examine((0, row)).outcomes:
                kept = decide(examined, index, tally)
                kept_bytes += len(row_line(kept)) if kept is not None else 0
            filter_s += time.perf_counter() - filter_started
            num_filtered += 1
        elif chunk_bytes >= _READ_BYTES:
            is_whole = False
            break
    read_s = time.perf_counter() - started - filter_s
    reader.close()
    index.commit({})
    return _Sample(
        tally.kept,
        kept_bytes,
        num_filtered,
        filter_s,
        read_s,
        is_whole,
        chunk_rows,
        chunk_bytes,
    )


def _estimate_self(settings: PrepareSettings, source: SourceSettings) -> SourceEstimate:
    rows = source.self_settings(settings.self_prompts).rows
    return SourceEstimate(
        name=source.name,
        licence=source.licence,
        files=0,
        schemas={},
        stored_bytes=0,
        rows=rows,
        is_exact=True,
        kept=rows,
        kept_bytes=rows * _SELF_ROW_BYTES,
        seconds=None,
    )


def _bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
