"""The stage: a directory of conversations in, a directory of the target's answers out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.toml_settings import to_plain
from fledge.data.card_parts import add_answers
from fledge.data.input_rows import InputRows
from fledge.data.regenerate.dialogue import Dialogue
from fledge.data.regenerate.journal import JOURNAL_NAME, Journal, read_entries
from fledge.data.regenerate.merge import merge
from fledge.data.regenerate.worklist import Worklist
from fledge.store.capacity import require_disk, translated_disk_errors
from fledge.store.manifest import (
    ANSWERS,
    CONVERSATIONS,
    MANIFEST_NAME,
    Manifest,
    Plan,
    read_input,
)
from fledge.store.stage_directory import StageDirectory, open_stage

BATCH_PATTERN = "batch-*.jsonl*"
"""Files of the Batch API's way, which are of no use once the directory is whole."""

_HOW_SETTINGS = ("concurrency", "cache_tokens", "retries", "timeout_s")
"""Settings that change how long it takes and nothing else: a resumed run may have others."""

_TYPICAL_ANSWER_TOKENS = 512
_BYTES_PER_TOKEN = 4


class Answerer(Protocol):
    """A way to get replies from the target."""

    model: str
    device: str
    """Where the target runs, for the manifest."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a resumed run and later stages must agree with: at least the model's name."""

    def answer(self, worklist: Worklist) -> None:
        """Take open rows, ask, and record, fail or postpone each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a run would do."""

    rows: int
    rows_done: int
    rows_to_ask: int
    questions: int
    """Questions about the rows to ask, if no conversation ends early."""

    needed_bytes: int
    """Room on disk that journal and output still take."""

    is_finished: bool


def regenerate(
    source: Path,
    out: Path,
    settings: RegenerateSettings,
    answerer: Answerer,
    *,
    progress: Progress,
    give_up: bool = False,
) -> Manifest:
    """Have the target answer; goes on where an earlier run of the same command stopped.

    Rows that get no answer although the server answers others stop the run at its end, unless
    `give_up` counts them as failed.
    """
    parent = read_input(source, CONVERSATIONS)
    _check_sources(parent, settings)
    decisive = {k: v for k, v in to_plain(settings).items() if k not in _HOW_SETTINGS}
    plan = Plan(
        kind=ANSWERS,
        settings=decisive,
        parents={CONVERSATIONS: parent.fingerprint},
        identity=dict(answerer.identity),
    )
    with open_stage(out, plan, has_results=_has_answers) as stage:
        if not stage.is_finished:
            with (
                _open_rows(source, parent, settings, progress) as rows,
                translated_disk_errors(out, place="output"),
            ):
                _run(stage, rows, settings, answerer, progress, give_up=give_up)
        for leftover in [out / JOURNAL_NAME, *out.glob(BATCH_PATTERN)]:
            leftover.unlink(missing_ok=True)
        return stage.manifest


def _open_rows(
    source: Path, parent: Manifest, settings: RegenerateSettings, progress: Progress
) -> InputRows:
    """Each row as often as it is to be answered."""
    by_source = {name: settings.answers_of(name) for name in settings.source_temperatures}
    return InputRows(source, parent, progress, copies=settings.answers, source_copies=by_source)


def _check_sources(parent: Manifest, settings: RegenerateSettings) -> None:
    known = parent.counts.get("sources", {})
    for name in settings.source_temperatures:
        if name not in known:
            raise ConfigError(
                f"regenerate.source_temperatures names {name!r}, and the rows are of "
                f"{', '.join(known) or 'no source'}; name one of these, or leave it out."
            )


def _has_answers(out: Path) -> bool:
    """Whether there is anything in the journal beside rows that failed, which are asked again."""
    journal = out / JOURNAL_NAME
    entries = read_entries(journal) if journal.exists() else iter(())
    return any(entry is None or entry.kind != "failed" for entry in entries)


def preview(
    source: Path, out: Path, settings: RegenerateSettings, *, progress: Progress
) -> Preview:
    """How much there is to ask; writes nothing and asks nobody."""
    parent = read_input(source, CONVERSATIONS)
    _check_sources(parent, settings)
    journal = out / JOURNAL_NAME
    is_finished = (out / MANIFEST_NAME).exists()
    with (
        _open_rows(source, parent, settings, progress) as rows,
        progress.task("counting questions", len(rows), "rows") as task,
    ):
        is_done = bytearray([is_finished]) * len(rows)
        for entry in read_entries(journal) if journal.exists() else ():
            if entry is not None and entry.kind == "end" and entry.row < len(rows):
                is_done[entry.row] = True
        num_to_ask = num_questions = 0
        for row in range(len(rows)):
            num_turns = 0 if is_done[row] else Dialogue(row, rows[row], settings, "").num_turns
            num_to_ask += num_turns > 0
            num_questions += num_turns
            task.advance(1)
        return Preview(
            rows=len(rows),
            rows_done=sum(is_done),
            rows_to_ask=num_to_ask,
            questions=num_questions,
            needed_bytes=0 if is_finished else _needed_bytes(rows, settings, journal),
            is_finished=is_finished,
        )


def _run(
    stage: StageDirectory,
    rows: InputRows,
    settings: RegenerateSettings,
    answerer: Answerer,
    progress: Progress,
    *,
    give_up: bool,
) -> None:
    path = stage.path / JOURNAL_NAME
    require_disk(stage.path, _needed_bytes(rows, settings, path), "the answers", place="output")
    with Journal(path) as journal:
        worklist = Worklist(rows, journal, settings, answerer.model, gives_up=give_up)
        if worklist.num_damaged:
            progress.note(
                f"damaged lines in {JOURNAL_NAME}: {worklist.num_damaged}; their rows are asked "
                "again."
            )
        if worklist.num_done:
            progress.note(f"{worklist.num_done:,} of {len(rows):,} rows were answered before.")
        with progress.task(f"asking {answerer.model}", worklist.num_open, "rows") as task:
            worklist.task = task
            _ask_all(worklist, answerer, give_up=give_up)
        worklist.task = None
        files, tally = merge(worklist, stage.path, progress)
    counts = tally.to_json()
    figures = {"model": answerer.model, "settings": stage.plan.settings, **counts}
    files += add_answers(rows.directory, stage.path, figures)
    stage.finish(counts=counts, files=files, device=answerer.device)


def _ask_all(worklist: Worklist, answerer: Answerer, *, give_up: bool) -> None:
    """Rounds over the open rows, as long as each round gets something done."""
    is_moving = True
    while is_moving:
        num_open = worklist.num_open
        answerer.answer(worklist)
        if not worklist.num_postponed:
            break
        is_moving = worklist.num_open < num_open
        if is_moving:
            worklist.reopen()
    if worklist.num_postponed:
        if not (give_up and worklist.has_answers):
            raise worklist.unanswered()
        worklist.give_up()
    if worklist.num_failed and not worklist.has_answers:
        raise worklist.all_refused()


def _needed_bytes(rows: InputRows, settings: RegenerateSettings, journal: Path) -> int:
    """Room that is still needed: answers once in the journal, once in the rows."""
    answer_tokens = min(settings.max_tokens, _TYPICAL_ANSWER_TOKENS)
    answers = len(rows) * answer_tokens * _BYTES_PER_TOKEN
    written = journal.stat().st_size if journal.exists() else 0
    return max(0, rows.num_bytes + 2 * answers - written)
