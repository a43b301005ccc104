"""The stages that measure a head, as `fledge run` calls them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fledge.contracts.run_settings import StageName
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import EngineSettings
from fledge.contracts.tuned_settings import TunedSettings, read_tuned
from fledge.lab.bench import bench, jobs_of
from fledge.lab.bench_arms import EngineChoice, server_arms, with_room
from fledge.lab.bench_engine_arms import device_name, engine_arms
from fledge.lab.candidates import Candidate, find_candidates, fingerprints
from fledge.lab.load_driver import Arm
from fledge.lab.load_point import num_requests
from fledge.lab.report import PAGE_NAME, make_report
from fledge.lab.scorecard import read_scorecard
from fledge.lab.select_job import SelectJob, prepare_candidates
from fledge.lab.select_plan import plan_selection
from fledge.lab.select_stage import select
from fledge.lab.tune_plan import plan_tuning
from fledge.lab.tune_stage import tune
from fledge.pipeline.road import Forecast, Road
from fledge.store.manifest import Manifest, read_manifest

REPORTED: tuple[StageName, ...] = ("select", "tune", "bench", "train")
"""Stages that the page is about."""


@dataclass(frozen=True, slots=True)
class ChosenHead:
    """The head that the rest of the road is about."""

    directory: Path
    fingerprint: str


def source_of_head(road: Road) -> tuple[StageName, ...]:
    """Who chose the head: measurements of the engine, or training's own."""
    return ("train", "select") if road.has("select") else ("train",)


def source_of_drafting(road: Road) -> tuple[StageName, ...]:
    """Who chose the head, and who found out how to draft with it."""
    return (*source_of_head(road), "tune") if road.has("tune") else source_of_head(road)


def chosen_head(road: Road) -> ChosenHead:
    directory = road.place("train")
    if road.has("select"):
        directory = road.out / read_scorecard(road.place("select"))["best"]
    candidate = Candidate(name=directory.name, directory=directory)
    return ChosenHead(directory, fingerprints([candidate], road.progress)[candidate.name])


def tuned_settings(road: Road) -> TunedSettings | None:
    return read_tuned(road.place("tune")) if road.has("tune") else None


def make_scorecard(road: Road) -> Manifest:
    job = _select_job(road)
    return select(job, road.recipe.select, road.place("select"), progress=road.progress)


def forecast_scorecard(road: Road) -> Forecast:
    planned = plan_selection(_select_job(road), road.recipe.select)
    return Forecast(
        work=f"{planned.heads:,} heads on {planned.questions:,} questions, {planned.answers:,} "
        f"answers of at most {road.recipe.select.max_tokens:,} tokens"
    )


def _select_job(road: Road) -> SelectJob:
    return _job(road, find_candidates([road.place("train")]), road.recipe.select)


def make_tuning(road: Road) -> Manifest:
    return tune(_tune_job(road), road.recipe.tune, road.place("tune"), progress=road.progress)


def forecast_tuning(road: Road) -> Forecast:
    planned = plan_tuning(_tune_job(road), road.recipe.tune)
    return Forecast(
        work=f"{planned.shapes:,} of {planned.shapes_of_lattice:,} shapes, at most "
        f"{planned.answers:,} answers of at most {road.recipe.tune.max_tokens:,} tokens"
    )


def _tune_job(road: Road) -> SelectJob:
    directory = chosen_head(road).directory
    candidate = Candidate(name=str(directory), directory=directory)
    return _job(road, [candidate], road.recipe.tune.measuring())


def _job(road: Road, found: Sequence[Candidate], settings: SelectSettings) -> SelectJob:
    """Heads are called by where they lie below the run, which may be moved as a whole."""
    return prepare_candidates(
        [replace(one, name=str(one.directory.relative_to(road.out))) for one in found],
        road.target,
        settings,
        device=road.device,
        needs_weights=True,
        progress=road.progress,
    )


def make_bench(road: Road) -> Manifest:
    head = chosen_head(road)
    bench(
        _arms(road, head.directory),
        road.recipe.bench,
        road.place("bench"),
        device=device_name(road.device),
        progress=road.progress,
        parents={"head": head.fingerprint},
    )
    return read_manifest(road.place("bench"))


def forecast_bench(road: Road) -> Forecast:
    settings = road.recipe.bench
    jobs = list(jobs_of(_arms(road, chosen_head(road).directory), settings))
    requests = sum(num_requests(job.point, settings) for job in jobs)
    return Forecast(work=f"{len(jobs):,} measurements, {requests:,} requests")


def _arms(road: Road, head: Path) -> list[Arm]:
    settings, tuned = road.recipe.select, tuned_settings(road)
    engine = EngineSettings(
        tree=settings.tree, controller=settings.controller, copies=settings.copies
    )
    if tuned is not None:
        engine = replace(
            engine, tree=tuned.tree, controller=tuned.controller or settings.controller
        )
    choice = EngineChoice(
        target=road.target,
        head=head,
        dtype=road.dtype,
        device=road.device,
        engine=with_room(engine, road.recipe.bench),
    )
    arms = engine_arms if road.recipe.run.bench_offline else server_arms
    return arms(choice, road.recipe.bench)


def reported_stages(road: Road) -> tuple[StageName, ...]:
    return tuple(name for name in REPORTED if road.has(name))


def make_page(road: Road) -> None:
    """Drawn anew each time, which takes a moment."""
    make_report(
        [road.place(name) for name in reported_stages(road)],
        road.place("report"),
        progress=road.progress,
    )


def page_of(road: Road) -> Path:
    return road.place("report") / PAGE_NAME


def forecast_page(road: Road) -> Forecast:
    return Forecast(work=str(page_of(road)))
