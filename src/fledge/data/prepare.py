"""The stage `prepare`: from the sources of a recipe to one directory of clean conversations.

    filter   sources in the recipe's order -> work/source-NNN/, see `filtering`
    blend    chosen rows of all sources, interleaved -> rows-NNNNN.jsonl
    card     what came out -> card.json, card.md, and the manifest, which ends the stage

Killed at any moment, it goes on where it stopped, and the result has the bytes of an unbroken run.
Memory does not grow with the rows; the disk holds the kept rows twice until the stage ends.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fledge.contracts.data_settings import PrepareSettings, decisive_self
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.toml_settings import to_plain
from fledge.data.blend import choose_lines, count_blend, interleave
from fledge.data.card import make_card, write_card
from fledge.data.duplicates import DuplicateIndex
from fledge.data.examination import Examination, open_examination
from fledge.data.filtering import (
    ROWS_PER_SAVE,
    FilterPass,
    SelfPrompts,
    source_directory,
)
from fledge.data.inputs import benchmark_names, check_inputs, resolve_paths
from fledge.data.prepare_estimate import estimate_prepare, require_room
from fledge.data.row_files import MAX_BYTES, MAX_ROWS, RowFiles, remove_from
from fledge.data.statistics import RowStatistics
from fledge.data.tally import SourceTally
from fledge.store.capacity import free_bytes, num_cores, translated_disk_errors
from fledge.store.manifest import Manifest, Plan
from fledge.store.rows import read_rows, row_files, rows_file
from fledge.store.stage_directory import StageDirectory, open_stage

KIND = "conversations"
WORK_NAME = "work"
"""Directory of everything that is needed only until the stage ends."""

_INDEX_NAME = "duplicates.sqlite"
_WORTH_WORKERS = 50_000_000
"""Bytes of input from which starting other processes pays."""

_PLENTY = 20
"""A disk with so many times the bytes of the inputs is large enough without a closer look."""


def prepare(
    settings: PrepareSettings,
    out: Path,
    *,
    target: str,
    self_prompts: SelfPrompts | None,
    progress: Progress,
    base: Path = Path(),
    num_workers: int | None = None,
    rows_per_save: int = ROWS_PER_SAVE,
) -> Manifest:
    """Run or resume the stage; relative paths of the settings start at `base`.

    `num_workers` processes filter rows, by default one for each core where there is enough to do;
    the result is the same with any number.
    """
    resolved = resolve_paths(settings, base)
    writer = target if any(source.is_self for source in settings.sources) else None
    inputs = check_inputs(resolved, progress)
    plan = Plan(
        kind=KIND,
        settings=_decisive(settings),
        parents=inputs.fingerprints,
        identity={} if writer is None else {"target": writer},
    )
    with open_stage(out, plan) as stage, translated_disk_errors(out, place="output"):
        work = out / WORK_NAME
        if not stage.is_finished:
            if inputs.num_bytes * _PLENTY > free_bytes(out):
                require_room(estimate_prepare(resolved, out, progress=progress), out)
            examination = open_examination(
                resolved, num_workers or _choose_workers(inputs.num_bytes), progress
            )
            with closing(examination):
                tallies, index = _filter(
                    resolved, work, examination, self_prompts, progress, rows_per_save
                )
            _blend(settings, work, out, tallies, progress)
            _finish(stage, settings, tallies, index, progress)
        shutil.rmtree(work, ignore_errors=True)
        return stage.manifest


def _decisive(settings: PrepareSettings) -> dict[str, Any]:
    """The settings as the plan has them. Sources without self prompts of their own are as they were
    before there were any, so that work begun then goes on."""
    plain: dict[str, Any] = to_plain(settings)
    for source in plain["sources"]:
        if not source["self_prompts"]:
            del source["self_prompts"]
    return {**plain, "self_prompts": decisive_self(settings.self_prompts)}


def _choose_workers(num_bytes: int) -> int:
    return num_cores() if num_bytes >= _WORTH_WORKERS else 1


def _filter(
    settings: PrepareSettings,
    work: Path,
    examination: Examination,
    self_prompts: SelfPrompts | None,
    progress: Progress,
    rows_per_save: int,
) -> tuple[list[SourceTally], dict[str, Any]]:
    """Counts of all sources, and what the index of duplicates took."""
    work.mkdir(exist_ok=True)
    with DuplicateIndex(work / _INDEX_NAME, settings.duplicates) as index:
        if index.position is not None:
            progress.note(f"going on where an earlier run stopped ({work.parent})")
        tallies = FilterPass(
            settings,
            work,
            index,
            examination,
            self_prompts=self_prompts,
            progress=progress,
            rows_per_save=rows_per_save,
        ).run()
        return tallies, {"rows": index.num_rows, "bytes_per_row": round(index.bytes_per_row, 1)}


def _blend(
    settings: PrepareSettings,
    work: Path,
    out: Path,
    tallies: Sequence[SourceTally],
    progress: Progress,
) -> None:
    counts = count_blend(settings, [tally.kept for tally in tallies])
    total = sum(counts)
    if not total:
        read = sum(tally.rows_read for tally in tallies)
        raise ConfigError(
            f"no rows are left of the {read:,} that were read{_losses(tallies)}. Loosen the "
            "filters, caps or weights, or name other sources."
        )
    if total < settings.rows:
        progress.note(f"the recipe asks for {settings.rows:,} rows and its sources have {total:,}")
    sources = [
        (count, choose_lines(source_directory(work, number), tally.kept, count, settings.seed))
        for number, (count, tally) in enumerate(zip(counts, tallies, strict=True))
    ]
    with (
        progress.task("blending", total, unit="rows") as task,
        closing(_FilesGoingOn(out)) as files,
    ):
        for line in interleave(sources):
            files.write(line)
            task.advance(1)
        files.publish()


class _FilesGoingOn:
    """Row files of the blend; those that an earlier run finished are not written again."""

    def __init__(self, out: Path) -> None:
        self._num_there = 0
        while rows_file(out, self._num_there).exists():
            self._num_there += 1
        remove_from(out, self._num_there)
        self._files = RowFiles(out, first=self._num_there)
        self._number = self._num_rows = self._num_bytes = 0

    def write(self, line: bytes) -> None:
        if self._number >= self._num_there:
            self._files.write(line)
        self._num_rows += 1
        self._num_bytes += len(line)
        if self._num_rows >= MAX_ROWS or self._num_bytes >= MAX_BYTES:
            self._files.publish()
            self._number += 1
            self._num_rows = self._num_bytes = 0

    def publish(self) -> None:
        self._files.publish()

    def close(self) -> None:
        self._files.close()


def _finish(
    stage: StageDirectory,
    settings: PrepareSettings,
    tallies: Sequence[SourceTally],
    index: Mapping[str, Any],
    progress: Progress,
) -> None:
    statistics = RowStatistics()
    num_rows = sum(count_blend(settings, [tally.kept for tally in tallies]))
    with progress.task("describing", num_rows, unit="rows") as task:
        for row in read_rows(stage.path):
            statistics.add(row)
            task.advance(1)
    card = make_card(
        settings,
        tallies,
        statistics,
        benchmarks=benchmark_names(stage.plan.parents),
        index=index,
        target=stage.plan.identity.get("target"),
    )
    card_files = write_card(stage.path, card)
    counts = {
        "rows": card["rows"],
        "licences": card["licences"],
        "sources": {entry["name"]: entry["rows"] for entry in card["sources"]},
    }
    stage.finish(counts=counts, files=[*row_files(stage.path), *card_files], progress=progress)


def _losses(tallies: Sequence[SourceTally]) -> str:
    """Where the rows went, for the error that none are left."""
    losses = {
        "bad": sum(tally.bad for tally in tallies),
        "dropped for privacy": sum(tally.private for tally in tallies),
        "duplicates": sum(t.exact_duplicates + t.near_duplicates for t in tallies),
        "in a benchmark": sum(tally.num_overlaps for tally in tallies),
        "not chosen": sum(tally.kept for tally in tallies),
    }
    parts = [f"{count:,} {what}" for what, count in losses.items() if count]
    return f" ({', '.join(parts)})" if parts else ""
