"""What a run would do, before it does it: stage by stage, as far as each can say."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fledge.contracts.errors import FledgeError
from fledge.contracts.run_settings import StageName
from fledge.pipeline.road import Road, Stage
from fledge.pipeline.run import require_inputs
from fledge.pipeline.stage_table import stages_of
from fledge.store.manifest import MANIFEST_NAME
from fledge.store.stage_directory import PLAN_NAME

FINISHED, GOES_ON, TO_DO, REFUSED = "finished", "goes on", "to do", "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage, as it stands."""

    name: StageName
    state: str
    work: str
    """What is left to do, or why that is not known yet, or why it is refused."""

    written_bytes: int | None = None
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_run(road: Road) -> list[PlannedStage]:
    """Asks the stages whose inputs are there; makes nothing."""
    stages = stages_of(road)
    require_inputs(road, stages)
    planned: list[PlannedStage] = []
    for stage in stages:
        planned.append(_plan(road, stage, planned))
    return planned


def _plan(road: Road, stage: Stage, before: Sequence[PlannedStage]) -> PlannedStage:
    waits_for = [name for name in stage.reads(road) if not _is_ready(road, name, before)]
    if waits_for:
        state = TO_DO if not road.is_finished(stage.name) else "finished, not compared"
        return PlannedStage(
            name=stage.name, state=state, work=f"known when {waits_for[0]} is finished"
        )
    try:
        if road.is_finished(stage.name):
            # A finished stage makes nothing: it compares itself with what is asked.
            stage.make(road)
            return PlannedStage(name=stage.name, state=FINISHED, work="nothing left")
        forecast = stage.forecast(road)
    except FledgeError as error:
        return PlannedStage(name=stage.name, state=REFUSED, work=str(error))
    return PlannedStage(
        name=stage.name,
        state=GOES_ON if (road.place(stage.name) / PLAN_NAME).exists() else TO_DO,
        work=forecast.work,
        written_bytes=forecast.written_bytes,
        seconds=forecast.seconds,
    )


def _is_ready(road: Road, name: StageName, before: Sequence[PlannedStage]) -> bool:
    """Whether what is there now is what the stage would read."""
    is_there = (road.place(name) / MANIFEST_NAME).exists()
    return is_there and all(one.state == FINISHED for one in before if one.name == name)
