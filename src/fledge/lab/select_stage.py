"""The stage behind `fledge select`: heads in, one scorecard out.

    find heads and prompts ─> own answers ─> visits, halving on the way ─> scorecard

Every visit is in the journal as soon as it is complete, so a killed run goes on with the next one.
Which heads were given up follows from the visits alone.
"""

from pathlib import Path
from typing import Any

from fledge.contracts.errors import MeasurementError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import EngineSettings
from fledge.data.regenerate.journal import NOWHERE, Journal, read_entries
from fledge.engine.engine import Engine
from fledge.lab.arms import decode_options
from fledge.lab.candidates import load_candidate, strange_weights
from fledge.lab.measure import Clock, wall_clock
from fledge.lab.questions import (
    Question,
    make_own_answers,
    make_questions,
    prompt_name,
    refuse_long,
)
from fledge.lab.scorecard import SCORECARD_NAME, Found
from fledge.lab.scorecard_page import PAGE_NAME
from fledge.lab.select_job import SelectJob
from fledge.lab.selection import VISIT, Selection
from fledge.lab.visit_records import VisitRecord
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.store.capacity import translated_disk_errors
from fledge.store.manifest import Manifest
from fledge.store.stage_directory import StageDirectory, open_stage

JOURNAL_NAME = "measurements.journal"
_OWN = "own"
_TOGETHER = 16


def select(
    job: SelectJob,
    settings: SelectSettings,
    out: Path,
    *,
    progress: Progress | None = None,
    clock: Clock = wall_clock,
) -> Manifest:
    """Measure what was not measured yet, and write the scorecard."""
    shown = progress or SilentProgress()
    with (
        translated_disk_errors(out, place="output"),
        open_stage(out, job.plan(settings), has_results=has_journal) as stage,
    ):
        if not stage.is_finished:
            _measure(stage, job, settings, shown, clock)
    return stage.manifest


def has_journal(out: Path) -> bool:
    journal = out / JOURNAL_NAME
    return journal.exists() and journal.stat().st_size > 0


def _measure(
    stage: StageDirectory,
    job: SelectJob,
    settings: SelectSettings,
    progress: Progress,
    clock: Clock,
) -> None:
    target = job.load_target(progress)
    heads, failed = _load_heads(job, target, progress)
    with Journal(stage.path / JOURNAL_NAME) as journal:
        questions, num_left_out = ask_first(journal, target, job, settings, progress)
        run = Selection(
            job=job,
            settings=settings,
            out=stage.path,
            progress=progress,
            target=target,
            journal=journal,
            questions=questions,
            num_left_out=num_left_out,
            found=Found(
                records=read_visits(journal.path),
                heads=dict(job.fingerprints),
                left=list(heads),
                failed=failed,
            ),
            clock=clock,
        )
        try:
            run.go_on(heads)
        except BaseException:
            # Ctrl-C too: whoever stops a long run wants to see what it has.
            run.write(state="unfinished")
            raise
    run.examine()
    card = run.write(state="finished")
    if card["best"] is None:
        raise MeasurementError(run.explain_nothing())
    files = [stage.path / name for name in (SCORECARD_NAME, PAGE_NAME, JOURNAL_NAME)]
    counts = {name: card[name] for name in ("best", "ties", "verdict", "visits", "cost")}
    stage.finish(counts=counts, files=files, device=str(job.device))


def _load_heads(
    job: SelectJob, target: Target, progress: Progress
) -> tuple[dict[str, Eagle3Head], dict[str, str]]:
    """Heads by name, and those that cannot be measured; one of another target ends the run."""
    heads: dict[str, Eagle3Head] = {}
    failed: dict[str, str] = {}
    for candidate in job.candidates:
        head = load_candidate(candidate, target)
        strange = strange_weights(head)
        if strange is None:
            heads[candidate.name] = head
        else:
            failed[candidate.name] = f"{strange} holds values that are no numbers."
            progress.note(f"{candidate.name} is left out: {failed[candidate.name]}")
    if not heads:
        name, error = next(iter(failed.items()))
        raise MeasurementError(f"no head can be measured; of {name}, {error}")
    return heads, failed


def ask_first(
    journal: Journal,
    target: Target,
    job: SelectJob,
    settings: SelectSettings,
    progress: Progress,
) -> tuple[tuple[Question, ...], int]:
    """All questions, after the target has answered the turns that later ones continue."""
    prompts, options = job.prompts, decode_options(settings)
    known = _read_own_answers(journal.path)
    numbers = {prompt_name(prompt): i for i, prompt in enumerate(prompts)}
    talks = [prompt for prompt in prompts if len(prompt.turns) > 1]
    missing = len(talks) - len(known)
    if missing > 0:
        with progress.task("answering first turns", missing, unit="conversations") as task:

            def keep(name: str, answers: list[str]) -> None:
                journal.append(_OWN, numbers[name], NOWHERE, {"name": name, "answers": answers})
                task.advance(1)

            together = EngineSettings(max_requests=_TOGETHER, share_prefixes=False)
            engine = Engine(target, None, together)
            known = make_own_answers(engine, talks, options, known=known, keep=keep)
    asked = [one for one in prompts if len(one.turns) == 1 or prompt_name(one) in known]
    too_long = sum(len(one.turns) for one in prompts) - sum(len(one.turns) for one in asked)
    questions, num_left_out = refuse_long(
        make_questions(target, asked, known),
        context_len=target.context_len,
        max_tokens=settings.max_tokens,
    )
    if num_left_out + too_long:
        progress.note(
            f"left out as too long for the target's context: {num_left_out + too_long} of "
            f"{len(questions) + num_left_out + too_long} questions."
        )
    return questions, num_left_out + too_long


def _read_own_answers(path: Path) -> dict[str, Any]:
    entries = (entry for entry in read_entries(path) if entry is not None and entry.kind == _OWN)
    return {entry.payload["name"]: entry.payload["answers"] for entry in entries}


def read_visits(path: Path) -> list[VisitRecord]:
    return [
        VisitRecord.from_json(entry.row, entry.payload)
        for entry in read_entries(path)
        if entry is not None and entry.kind == VISIT
    ]
