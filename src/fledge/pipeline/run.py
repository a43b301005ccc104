"""`fledge run`: the stages of a recipe one after another, each as far as it is not made yet.

    prepare ─> regenerate ─> tokenize ─> capture ─> train ─> select ─> tune ─> bench
    ─> export ─> report

Every stage keeps its own directory below the run's, with its own manifest, and can go on after a
kill. A stage that is finished compares its settings and inputs with its manifest and returns at
once, or refuses: nothing of another recipe is ever used.
"""

import gc
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.errors import ConfigError, FledgeError, MismatchError
from fledge.contracts.run_settings import STAGES, StageName
from fledge.pipeline.road import Road, Stage
from fledge.pipeline.stage_table import stages_of
from fledge.store.local_place import LocalPlace
from fledge.store.manifest import MANIFEST_NAME
from fledge.store.stage_directory import PLAN_NAME

_LABEL = "the whole run"


class StageError(FledgeError):
    """A stage of a run failed; says which, and how to go on."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """How a stage of this run went."""

    name: StageName
    state: str
    """`made`, or `finished before`."""

    directory: Path
    seconds: float
    fingerprint: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "directory": str(self.directory),
            "seconds": round(self.seconds, 3),
            "fingerprint": self.fingerprint,
        }


def run(road: Road, *, redo: StageName | None = None) -> list[StageOutcome]:
    """Make what is missing; `redo` makes that stage and everything after it again."""
    stages = stages_of(road)
    require_inputs(road, stages)
    with LocalPlace(road.out).locked():
        if redo is not None:
            _remove_from(road, redo)
        outcomes: list[StageOutcome] = []
        with road.progress.task(_LABEL, unit="") as task:
            for number, stage in enumerate(stages, start=1):
                where = f"stage {number} of {len(stages)}: {stage.name}"
                road.progress.note(where)
                task.update_label(where)
                outcomes.append(_make(road, stage, outcomes))
            task.update_label(_LABEL)
        return outcomes


def require_inputs(road: Road, stages: Sequence[Stage]) -> None:
    """Refuse a road with a gap before anything runs."""
    for stage in stages:
        reads = stage.reads(road)
        if stage.name == "report" and not reads:
            raise ConfigError(
                "run.stages has report, and none of the stages that it is about: add train, "
                "select or bench."
            )
        for name in reads:
            if not road.has(name) and not road.is_finished(name):
                raise ConfigError(
                    f"the stage {stage.name} reads what {name} makes, and {road.place(name)} is "
                    f"not there; add {name} to run.stages."
                )


def _make(road: Road, stage: Stage, done: Sequence[StageOutcome]) -> StageOutcome:
    was_finished = road.is_finished(stage.name)
    was_begun = was_finished or (road.place(stage.name) / PLAN_NAME).exists()
    started = time.monotonic()
    try:
        manifest = stage.make(road)
    except FledgeError as error:
        can_redo = was_begun and isinstance(error, MismatchError)
        text = _explain(road, stage, done, error, can_redo=can_redo)
        raise StageError(text, error.exit_code) from error
    except BaseException:
        # Ctrl-C, and what nobody foresaw: the error itself does not know about stages.
        road.progress.note(
            f"stopped in the stage {stage.name}. {_kept(done)} To go on: {road.command}"
        )
        raise
    finally:
        _free_memory()
    outcome = StageOutcome(
        name=stage.name,
        state="finished before" if was_finished else "made",
        directory=road.place(stage.name),
        seconds=time.monotonic() - started,
        fingerprint=None if manifest is None else manifest.fingerprint,
    )
    road.progress.note(f"{stage.name}: {outcome.state}, in {outcome.directory}")
    return outcome


def _explain(
    road: Road, stage: Stage, done: Sequence[StageOutcome], error: FledgeError, *, can_redo: bool
) -> str:
    again = f"To make {stage.name} and what follows it again: {road.command} --redo {stage.name}"
    remedy = again if can_redo else f"To go on: {road.command}"
    return " ".join([f"stage {stage.name}: {error}", _kept(done), remedy])


def _kept(done: Sequence[StageOutcome]) -> str:
    return f"Kept: {', '.join(one.name for one in done) or 'nothing yet'}."


def _remove_from(road: Road, first: StageName) -> None:
    """Remove what a stage and those after it made, and nothing that others did."""
    for name in STAGES[STAGES.index(first) :]:
        directory = road.place(name)
        if not any((directory / known).exists() for known in (MANIFEST_NAME, PLAN_NAME)):
            continue  # not there, not ours, or a page, which is drawn anew anyway
        with LocalPlace(directory).locked():
            shutil.rmtree(directory)
        road.progress.note(f"removed {directory}: it is made again")


def _free_memory() -> None:
    """The next stage loads its own target, and takes what memory is free then."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
