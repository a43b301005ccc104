"""`fledge bench` as a stage: loads in turns over all arms, journalled, then one document.

Arms take turns so that whatever drifts on a machine hits all of them: before every measurement
where changing is free, and in the order B A, A B, B A ... of whole sweeps where an arm has to be
started first.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fledge.contracts import provenance
from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress, Task
from fledge.contracts.toml_settings import to_plain
from fledge.lab.bench_document import BENCH_NAME, make_document
from fledge.lab.bench_figures import measure
from fledge.lab.bench_journal import BenchJournal, Measurement, has_measurements
from fledge.lab.load_client_cost import measure_client
from fledge.lab.load_driver import Arm, BenchError, Drive, Driver
from fledge.lab.load_http import BUSY
from fledge.lab.load_point import Point, num_requests, points_of
from fledge.lab.load_prompts import PromptSource, user_prompt
from fledge.store.manifest import BENCH, Plan, write_json
from fledge.store.stage_directory import StageDirectory, open_stage

_WARM_UP_TOKENS = 8
_PASSING_KINDS = {BUSY}
"""A server that sends everybody away says something about the load; any other failure of all
requests says that something is wrong."""


class Job(NamedTuple):
    """One measurement that is to be made."""

    arm: Arm
    point: Point
    repeat: int
    number: int
    """Of its load in the run, the same for all arms: it decides which prompts are sent."""

    start: int
    """Prompts handed out before."""

    @property
    def key(self) -> tuple[str, Point, int]:
        return self.arm.name, self.point, self.repeat


def bench(
    arms: Sequence[Arm],
    settings: BenchSettings,
    out: Path,
    *,
    device: str,
    progress: Progress,
    parents: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure everything that is not measured yet; returns what `bench.json` holds.

    `device` is what the measured runs on, as far as it is known; `parents` are fingerprints of what
    is measured, where the caller knows them: a directory with other ones is refused.
    """
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(f"two arms have the same name: {', '.join(names)}; name them NAME=URL.")
    prompts = PromptSource(settings)
    plan = Plan(
        kind=BENCH,
        settings=to_plain(settings),
        parents=dict(parents or {}),
        identity={
            "arms": [{"name": arm.name, **arm.identity} for arm in arms],
            "prompts": prompts.fingerprint,
        },
    )
    with open_stage(out, plan, has_results=has_measurements) as stage:
        journal = BenchJournal(stage.path)
        run = _Run(arms, settings, prompts, journal, stage, device, progress)
        if not stage.is_finished:
            run.measure_all()
            document = run.write_document(is_complete=True)
            files = [stage.path / BENCH_NAME, journal.path]
            stage.finish(counts=_counts(document), files=files, device=device)
            return document
        return run.document(is_complete=True)


def jobs_of(arms: Sequence[Arm], settings: BenchSettings) -> Iterator[Job]:
    """All measurements in the order in which they are made."""
    points, start = points_of(settings), 0
    is_quick = all(arm.is_quick_to_open for arm in arms)
    for repeat in range(settings.repeats):
        loads = []
        for place, point in enumerate(points):
            loads.append((point, repeat * len(points) + place, start))
            start += num_requests(point, settings)
        if is_quick:
            for point, number, begin in loads:
                for arm in arms if number % 2 == 0 else reversed(arms):
                    yield Job(arm, point, repeat, number, begin)
        else:
            # The last arm goes first: a head that does not fit is found out before long work.
            for arm in reversed(arms) if repeat % 2 == 0 else arms:
                for point, number, begin in loads:
                    yield Job(arm, point, repeat, number, begin)


class _Run:
    """One run of the stage."""

    def __init__(
        self,
        arms: Sequence[Arm],
        settings: BenchSettings,
        prompts: PromptSource,
        journal: BenchJournal,
        stage: StageDirectory,
        device: str,
        progress: Progress,
    ) -> None:
        self._arms, self._settings, self._prompts = arms, settings, prompts
        self._journal, self._stage, self._progress = journal, stage, progress
        self._device = device

    def measure_all(self) -> None:
        jobs = list(jobs_of(self._arms, self._settings))
        left = [job for job in jobs if not self._journal.has(job.key)]
        if len(left) < len(jobs):
            done = len(jobs) - len(left)
            self._progress.note(f"{done} of {len(jobs)} measurements are there already")
        total = sum(num_requests(job.point, self._settings) for job in left)
        try:
            with self._progress.task("measuring", total, unit="requests") as task:
                self._measure(left, task)
        except BenchError as error:
            self.write_document(is_complete=False)
            raise BenchError(
                f"{error} What was measured is in {self._stage.path / BENCH_NAME}; the same "
                "command goes on from there."
            ) from error

    def _measure(self, jobs: Sequence[Job], task: Task) -> None:
        is_quick = all(arm.is_quick_to_open for arm in self._arms)
        # Each repeat opens its arms anew: one that goes on has earlier prompts in its cache.
        by_opening = groupby(jobs, lambda job: (job.arm.name, job.repeat))
        groups = [jobs] if is_quick else [list(group) for _, group in by_opening]
        for group in groups:
            with ExitStack() as stack:
                drivers: dict[str, Driver] = {}
                for name, arm in {job.arm.name: job.arm for job in group}.items():
                    drivers[name] = stack.enter_context(arm.opened(self._progress))
                    self._journal.add_facts(name, dict(drivers[name].facts))
                if self._journal.client is None:
                    # After the servers were found, so that a wrong address is said at once.
                    with self._progress.task("measuring the client", unit=""):
                        self._journal.add_client(measure_client())
                for job in group:
                    self._measure_one(job, drivers[job.arm.name], task)

    def _measure_one(self, job: Job, driver: Driver, task: Task) -> None:
        settings, point = self._settings, job.point
        label = f"{job.arm.name}, {point.label}"
        task.update_label(f"{label}, repeat {job.repeat + 1} of {settings.repeats}")
        if settings.warm_up:
            self._require_found(job, self._warm_up(driver, point), label)
        count = num_requests(point, settings)
        drive = driver.drive(
            point,
            self._prompts.take(job.number, job.start, count),
            max_tokens=settings.max_tokens,
            seed=settings.seed + job.repeat,
            on_answer=lambda: task.advance(1),
        )
        self._require_found(job, drive, label)
        self._journal.add(
            Measurement(
                arm=job.arm.name,
                point=point,
                repeat=job.repeat,
                figures=measure(drive, point, settings),
            ),
            drive.answers,
        )

    def _warm_up(self, driver: Driver, point: Point) -> Drive:
        """One short request for each user; prompts that no measurement sends."""
        users = point.users if point.is_closed else min(8, self._settings.requests)
        return driver.drive(
            Point("closed", users),
            [user_prompt(f"Warm-up {number}: say hello.") for number in range(users)],
            max_tokens=min(_WARM_UP_TOKENS, self._settings.max_tokens),
            seed=0,
            on_answer=lambda: None,
        )

    def _require_found(self, job: Job, drive: Drive, label: str) -> None:
        """Keep and refuse a measurement that came to nothing."""
        answers = drive.answers
        good = sum(answer.is_good for answer in answers)
        kinds = {answer.failure.kind for answer in answers if answer.failure is not None}
        if drive.lost is None and (good or kinds <= _PASSING_KINDS):
            return
        figures = measure(drive, job.point, self._settings)
        errors = ", ".join(
            f"{entry['count']} x {kind} ({entry['example']})"
            for kind, entry in figures["errors"].items()
        )
        reason = drive.lost or errors
        lost = Measurement(
            arm=job.arm.name, point=job.point, repeat=job.repeat, figures=figures, lost=reason
        )
        self._journal.add(lost, answers)
        if drive.lost is not None:
            raise BenchError(
                f"the server of {label} does not answer any more, after {good} good answers of "
                f"this measurement: {drive.lost}."
            )
        raise BenchError(f"none of {len(answers)} requests succeeded ({label}): {errors}.")

    def write_document(self, *, is_complete: bool) -> dict[str, Any]:
        document = self.document(is_complete=is_complete)
        write_json(self._stage.path / BENCH_NAME, document)
        return document

    def document(self, *, is_complete: bool) -> dict[str, Any]:
        facts = self._journal.facts
        made = (
            self._stage.manifest.provenance
            if self._stage.is_finished
            else provenance.collect(device=self._device)
        )
        return make_document(
            self._journal.measurements,
            arms=[
                {"name": arm.name, **arm.identity, **facts.get(arm.name, {})} for arm in self._arms
            ],
            head={
                "provenance": dict(made),
                "settings": to_plain(self._settings),
                "prompts": self._prompts.label,
                "client": self._journal.client,
            },
            is_complete=is_complete,
        )


def _counts(document: dict[str, Any]) -> dict[str, Any]:
    rows = document["rows"]
    return {
        "arms": len(document["arms"]),
        "requests": sum(row["requests"] for row in rows),
        "good": sum(row["good"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
    }
