"""The stage behind `fledge tune`: a head in, the fastest way to draft with it out.

Every visit is in the journal as soon as it is complete, so a killed run goes on with the next one.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fledge.contracts import provenance
from fledge.contracts.errors import ArtifactError, MeasurementError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.toml_settings import to_plain
from fledge.contracts.tune_settings import TuneSettings
from fledge.contracts.tuned_settings import TUNING_NAME
from fledge.data.regenerate.journal import Journal
from fledge.lab.candidates import (
    Candidate,
    find_candidates,
    is_head,
    load_candidate,
    strange_weights,
)
from fledge.lab.differences import Differences, compare
from fledge.lab.measure import Clock, wall_clock
from fledge.lab.select_job import SelectJob, describe_job, prepare_candidates
from fledge.lab.select_stage import JOURNAL_NAME, ask_first, has_journal, read_visits
from fledge.lab.tune_document import TuneFigures
from fledge.lab.tune_page import PAGE_NAME, write_page
from fledge.lab.tune_search import Search
from fledge.lab.tune_visits import make_load_visits
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.models.weights_identity import weights_identity
from fledge.store.cache_publish import publish_file
from fledge.store.capacity import translated_disk_errors
from fledge.store.manifest import TUNING, Manifest, Plan, write_json
from fledge.store.stage_directory import StageDirectory, open_stage


def prepare_tuning(
    head: Path,
    target: str,
    settings: TuneSettings,
    *,
    device: str = "auto",
    needs_weights: bool = True,
    progress: Progress,
) -> SelectJob:
    """Find everything that is named; a run's directory is the head that it found best."""
    place = head.expanduser()
    found = [Candidate(name=str(place), directory=place)] if is_head(place) else []
    found = found or find_candidates([place])
    if len(found) > 1:
        raise ArtifactError(
            f"{place} holds {len(found)} heads and none that is finished; name one of them, as "
            f"{found[-1].directory}, or choose with `fledge select`."
        )
    return prepare_candidates(
        found,
        target,
        settings.measuring(),
        device=device,
        needs_weights=needs_weights,
        progress=progress,
    )


def plan_stage(job: SelectJob, settings: TuneSettings) -> Plan:
    # The name of the head's directory says nothing about it.
    fingerprint = job.fingerprints[job.candidates[0].name]
    return replace(
        job.plan(settings.measuring()),
        kind=TUNING,
        settings=to_plain(settings),
        parents={"head": fingerprint},
    )


def tune(
    job: SelectJob,
    settings: TuneSettings,
    out: Path,
    *,
    progress: Progress | None = None,
    clock: Clock = wall_clock,
) -> Manifest:
    """Measure what was not measured yet, and write what is best."""
    shown = progress or SilentProgress()
    with (
        translated_disk_errors(out, place="output"),
        open_stage(out, plan_stage(job, settings), has_results=has_journal) as stage,
    ):
        if not stage.is_finished:
            _measure(stage, job, settings, shown, clock)
    return stage.manifest


def _measure(
    stage: StageDirectory, job: SelectJob, settings: TuneSettings, progress: Progress, clock: Clock
) -> None:
    target = job.load_target(progress)
    head = _load_head(job.candidates[0], target)
    with Journal(stage.path / JOURNAL_NAME) as journal:
        questions, num_left_out = ask_first(journal, target, job, settings.measuring(), progress)
        search = Search(
            settings=settings,
            target_name=job.target,
            target=target,
            head=head,
            questions=questions,
            load=make_load_visits(questions, settings),
            journal=journal,
            known={record.number: record for record in read_visits(journal.path)},
            progress=progress,
            clock=clock,
        )
        result = _Result(job=job, search=search, out=stage.path, num_left_out=num_left_out)
        try:
            search.go_on()
        except BaseException:
            # Ctrl-C too: whoever stops a long run wants to see what it has.
            result.write(state="unfinished")
            raise
    result.examine()
    document = result.write(state="finished")
    if document["best"] is None:
        raise MeasurementError(search.explain_nothing())
    files = [stage.path / name for name in (TUNING_NAME, PAGE_NAME, JOURNAL_NAME)]
    counts = {name: document[name] for name in ("best", "ties", "verdict", "cost")}
    stage.finish(counts=counts, files=files, device=str(job.device))


def _load_head(candidate: Candidate, target: Target) -> Eagle3Head:
    head = load_candidate(candidate, target)
    strange = strange_weights(head)
    if strange is not None:
        raise MeasurementError(
            f"{candidate.name} cannot be tuned: {strange} holds values that are no numbers; take "
            "an earlier checkpoint."
        )
    return head


@dataclass(slots=True, kw_only=True)
class _Result:
    """What a search has found by now, as files."""

    job: SelectJob
    search: Search
    out: Path
    num_left_out: int
    differences: dict[str, Differences] = field(default_factory=dict)

    def examine(self) -> None:
        """Compare answers with and without drafts; a shape that changes answers does not count."""
        search, tried = self.search, self.search.tried
        prompts = {question.name: question.token_ids for question in search.questions}
        for name in [one for one in tried.shapes if one not in tried.failed]:
            compared = compare(
                [*tried.screening, *tried.final],
                name,
                search.target,
                prompts,
                is_greedy=search.settings.temperature == 0,
            )
            self.differences[name] = compared
            clear = compared.clear
            if clear is not None:
                tried.failed[name] = (
                    f"its answer to {clear.question} differs from plain decoding at token "
                    f"{clear.position}, where the logits are {clear.steps:.0f} steps apart: the "
                    "engine is at fault, and no figure counts."
                )

    def write(self, *, state: str) -> dict[str, Any]:
        search = self.search
        figures = TuneFigures(
            tried=search.tried,
            concurrency=search.load.concurrency,
            seed=search.settings.seed,
            differences=self.differences,
        )
        document = figures.document(self._facts(state))
        write_json(self.out / TUNING_NAME, document)
        publish_file(self.out / PAGE_NAME, write_page(document).encode())
        return document

    def _facts(self, state: str) -> dict[str, Any]:
        job, settings = self.job, self.search.settings
        loads = list(settings.concurrency)
        (head,) = job.candidates
        return {
            "state": state,
            **describe_job(job),
            "head": head.name,
            "made_for": {
                "head": job.fingerprints[head.name],
                "weights": weights_identity(job.directory),
            },
            "concurrency": loads[0] if len(loads) == 1 else loads,
            "settings": to_plain(settings),
            "num_questions": len(self.search.questions),
            "num_left_out": self.num_left_out,
            "cost": self.search.cost(),
            "provenance": provenance.collect(device=job.device_name),
        }
