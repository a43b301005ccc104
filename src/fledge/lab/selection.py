"""One selection while it runs: visits in order, heads given up on the way, figures at any time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fledge.contracts import provenance
from fledge.contracts.errors import CapacityError, MeasurementError
from fledge.contracts.progress import Progress, Task
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.toml_settings import to_plain
from fledge.data.regenerate.journal import NOWHERE, Journal
from fledge.lab.arms import Arms
from fledge.lab.differences import compare
from fledge.lab.measure import Clock
from fledge.lab.questions import Question
from fledge.lab.ranking import rank_heads
from fledge.lab.scorecard import SCORECARD_NAME, Found, make_scorecard
from fledge.lab.scorecard_page import PAGE_NAME, write_page
from fledge.lab.scoring import Scorer
from fledge.lab.select_job import SelectJob, describe_job
from fledge.lab.visit_records import VisitRecord
from fledge.lab.visits import Rung, Visit, count_runs, make_groups, make_visits, plan_rungs
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.store.cache_publish import publish_file
from fledge.store.manifest import write_json

VISIT = "visit"


@dataclass(slots=True, kw_only=True)
class Selection:
    """`found` grows with every visit."""

    job: SelectJob
    settings: SelectSettings
    out: Path
    progress: Progress
    target: Target
    journal: Journal
    questions: tuple[Question, ...]
    num_left_out: int
    found: Found
    clock: Clock
    visits: list[Visit] = field(init=False)
    rungs: list[Rung] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        groups = make_groups(self.questions, concurrency=settings.concurrency, seed=settings.seed)
        self.visits = make_visits(groups, repeats=settings.repeats)
        self.rungs = plan_rungs(
            len(self.found.left),
            self.visits,
            finalists=settings.finalists,
            is_halving=settings.halving,
        )

    def go_on(self, heads: Mapping[str, Eagle3Head]) -> None:
        """Make the visits that are missing; decide again what was decided before."""
        known = {record.number: record for record in self.found.records}
        self.found.records = []
        if known:
            self.progress.note(f"{len(known)} of {len(self.visits)} visits were made before.")
        total = count_runs(self.rungs, self.visits)
        arms: Arms | None = None
        done = 0
        with self.progress.task("measuring", total, unit="answers") as task:
            for rung in self.rungs:
                self._give_up(rung.num_heads)
                for visit in self.visits[done : rung.num_visits]:
                    if visit.number not in known:
                        arms = arms or self._open(heads, visit)
                        arms.keep(self.found.left)
                        known[visit.number] = self._visit(arms, visit)
                    self._take(known[visit.number], task)
                done = max(done, rung.num_visits)

    def _open(self, heads: Mapping[str, Eagle3Head], first: Visit) -> Arms:
        """Engines for the heads that are left, warmed up by visits that do not count."""
        left = {name: heads[name] for name in self.found.left}
        try:
            arms = Arms(
                self.target,
                left,
                self.settings,
                self.questions,
                target_name=self.job.target,
                clock=self.clock,
            )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.job.device} has no room for {len(left)} heads beside the target; name "
                "fewer heads at once, or lower concurrency or max_tokens."
            ) from error
        count = self.settings.warm_up
        with self.progress.task("warming up", count, unit="visits") as task:
            for visit in self.visits[first.number :][:count]:
                arms.measure(visit)
                task.advance(1)
        return arms

    def _visit(self, arms: Arms, visit: Visit) -> VisitRecord:
        record = VisitRecord(
            number=visit.number,
            task=visit.group.task,
            group=visit.group.number,
            repeat=visit.repeat,
            arms=arms.measure(visit),
        )
        self.journal.append(VISIT, visit.number, NOWHERE, record.to_json())
        return record

    def _take(self, record: VisitRecord, task: Task) -> None:
        found = self.found
        found.records.append(record)
        task.advance(sum(len(measured.answers) for measured in record.arms.values()))
        for name in [one for one in found.left if one in record.arms]:
            pairs = zip(record.arms[name].answers, record.plain.answers, strict=True)
            error = next((own.error for own, plain in pairs if own.error and not plain.error), None)
            if error is not None:
                found.left.remove(name)
                found.failed[name] = error
                self.progress.note(f"{name} is given up: {error}")
        if not found.left:
            raise MeasurementError(self.explain_nothing())
        tasks = {visit.group.task for visit in self.visits}
        if len(found.records) == len(tasks) and not _num_successes(found.records):
            raise MeasurementError(self.explain_nothing())

    def _give_up(self, count: int) -> None:
        """Go on with the fastest heads only."""
        left = self.found.left
        if len(left) <= count:
            return
        ranked = rank_heads(self.found.records, left, seed=self.settings.seed)
        kept = {one.head for one in ranked[:count]}
        self.found.left = [name for name in left if name in kept]
        visits = len(self.found.records)
        names = ", ".join(one.head for one in ranked[count:])
        self.progress.note(f"after {visits} visits, heads that go on: {count}; given up: {names}")

    def explain_nothing(self) -> str:
        """Why there are no figures."""
        if self.found.failed and not self.found.left:
            name, error = next(iter(self.found.failed.items()))
            return f"all {len(self.found.heads)} heads failed; of {name}: {error}"
        answers = [one for record in self.found.records for one in record.plain.answers]
        error = next((one.error for one in answers if one.error), "no question was asked.")
        return f"plain decoding answered none of {len(answers)} questions: {error}"

    def examine(self) -> None:
        """Compare answers with and without each head; one that changes answers is no head."""
        prompts = {question.name: question.token_ids for question in self.questions}
        for name in [one for one in self.found.heads if one not in self.found.failed]:
            compared = compare(
                self.found.records,
                name,
                self.target,
                prompts,
                is_greedy=self.settings.temperature == 0,
            )
            self.found.differences[name] = compared
            clear = compared.clear
            if clear is not None:
                self.found.failed[name] = (
                    f"its answer to {clear.question} differs from plain decoding at token "
                    f"{clear.position}, where the logits are {clear.steps:.0f} steps apart: the "
                    "engine is at fault, and no figure counts."
                )

    def write(self, *, state: str) -> dict[str, Any]:
        """The scorecard of what is there by now."""
        checks = {
            question.name: question.prompt.check
            for question in self.questions
            if question.is_last and question.prompt.check is not None
        }
        card = make_scorecard(
            self.found,
            self._facts(state),
            checks,
            Scorer(),
            seed=self.settings.seed,
            is_serial=self.settings.concurrency == 1,
        )
        write_json(self.out / SCORECARD_NAME, card)
        publish_file(self.out / PAGE_NAME, write_page(card).encode())
        return card

    def _facts(self, state: str) -> dict[str, Any]:
        tokenizer = self.target.tokenizer
        return {
            "state": state,
            **describe_job(self.job),
            "settings": to_plain(self.settings),
            "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
            "num_questions": len(self.questions),
            "num_left_out": self.num_left_out,
            "visits": {"done": len(self.found.records), "planned": len(self.visits)},
            "cost": self._cost(),
            "provenance": provenance.collect(device=self.job.device_name),
        }

    def _cost(self) -> dict[str, Any]:
        measured = [one for record in self.found.records for one in record.arms.values()]
        runs = sum(len(one.answers) for one in measured)
        whole = [Rung(num_heads=len(self.found.heads), num_visits=len(self.visits))]
        full = count_runs(whole, self.visits)
        return {
            "runs": runs,
            "runs_planned": count_runs(self.rungs, self.visits),
            "runs_without_halving": full,
            "saved_share": 1 - count_runs(self.rungs, self.visits) / full,
            "seconds": sum(one.seconds for one in measured),
        }


def _num_successes(records: Sequence[VisitRecord]) -> int:
    return sum(one.error is None for record in records for one in record.plain.answers)
