"""One tuning while it runs: a coarse grid, then the neighbours of the best, then a final.

    grid        every second value of depth, width and budget; the slower half given up, again
                and again, while visits double
    neighbours  of the fastest shape, on the same visits, until it has no faster one
    final       the fastest shapes with each controller, the fastest chain and what is served by
                default, measured anew on everything

What was decided follows from the visits alone, so a killed run decides the same again. The final
does not count what its shapes were chosen for, and they take turns with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fledge.contracts.errors import CapacityError, MeasurementError
from fledge.contracts.progress import Progress, Task
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tune_settings import TuneSettings
from fledge.data.regenerate.journal import NOWHERE, Journal
from fledge.lab.measure import Clock
from fledge.lab.questions import Question
from fledge.lab.ranking import rank_heads
from fledge.lab.selection import VISIT
from fledge.lab.tune_arms import ShapeArms
from fledge.lab.tune_shapes import Lattice, Shape
from fledge.lab.tune_visits import LoadVisits
from fledge.lab.visit_records import VisitRecord
from fledge.lab.visits import Visit
from fledge.models.head import Eagle3Head
from fledge.models.target import Target


@dataclass(slots=True)
class Tried:
    """Everything that was measured, and what became of the shapes."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """By name, in the order they were first tried."""

    screening: list[VisitRecord] = field(default_factory=list)
    final: list[VisitRecord] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by name."""

    finalists: list[str] = field(default_factory=list)

    def records_of(self, name: str) -> list[VisitRecord]:
        """Those of the final, for shapes that reached it."""
        final = [record for record in self.final if name in record.arms]
        return final or [record for record in self.screening if name in record.arms]


@dataclass(slots=True, kw_only=True)
class Search:
    """`tried` grows with every visit."""

    settings: TuneSettings
    target_name: str
    target: Target
    head: Eagle3Head
    questions: tuple[Question, ...]
    load: LoadVisits
    journal: Journal
    known: dict[int, VisitRecord]
    """Records of earlier runs, by their places in the journal."""

    progress: Progress
    clock: Clock
    tried: Tried = field(default_factory=Tried)
    _num_records: int = 0

    def go_on(self) -> None:
        """Measure what is missing; decide again what was decided before."""
        if self.known:
            self.progress.note(f"{len(self.known)} visits were made before.")
        lattice = Lattice(self.settings)
        left = self._search_grid(lattice.coarse())
        left = self._search_neighbours(lattice, left)
        self._measure_final(self._choose_finalists(left))

    def _search_grid(self, left: list[Shape]) -> list[Shape]:
        done = 0
        for rung in self.load.rungs(len(left), finalists=self.settings.finalists):
            left = self._fastest(left)[: rung.num_heads]
            visits = self.load.visits[done : rung.num_visits]
            self._measure(f"trying {len(left)} shapes", left, visits, self.tried.screening)
            done = rung.num_visits
        return left

    def _search_neighbours(self, lattice: Lattice, left: list[Shape]) -> list[Shape]:
        visits = self.load.visits[: self.load.num_screening]
        for _ in range(self.settings.rounds):
            best = self._fastest(left)[0]
            fresh = [one for one in lattice.neighbours(best) if one.name not in self.tried.shapes]
            if not fresh:
                break
            self._measure(f"around {best.name}", fresh, visits, self.tried.screening)
            left = [*left, *fresh]
        return left

    def _choose_finalists(self, left: list[Shape]) -> list[Shape]:
        ranked = self._fastest(left)
        chosen = ranked[: self.settings.finalists]
        final = [
            replace(shape, controller=controller)
            for shape in chosen
            for controller in self.settings.controllers
        ]
        # Engines without trees take the fastest chain, however slow it is beside a tree.
        final += self._longest_tried_chains()[:1]
        if "adaptive" in self.settings.controllers:
            tree = TreeSettings()
            final.append(
                Shape(depth=tree.depth, width=tree.width, budget=tree.budget, controller="adaptive")
            )
        return list(dict.fromkeys(final))

    def _longest_tried_chains(self) -> list[Shape]:
        counts = {
            shape: sum(name in record.arms for record in self.tried.screening)
            for name, shape in self.tried.shapes.items()
            if shape.is_chain and name not in self.tried.failed
        }
        most = max(counts.values(), default=0)
        return self._fastest([one for one in counts if counts[one] == most]) if counts else []

    def _measure_final(self, shapes: list[Shape]) -> None:
        self.tried.finalists = [shape.name for shape in shapes]
        self._measure(f"final of {len(shapes)}", shapes, self.load.visits, self.tried.final)

    def _fastest(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Those that have not failed, fastest first, by what they were tried on."""
        names = [one.name for one in shapes if one.name not in self.tried.failed]
        if not names:
            raise MeasurementError(self.explain_nothing())
        if not self.tried.screening:
            return list(shapes)
        ranked = rank_heads(self.tried.screening, names, seed=self.settings.seed)
        by_name = {one.name: one for one in shapes}
        return [by_name[one.head] for one in ranked]

    def _measure(
        self, title: str, shapes: list[Shape], visits: Sequence[Visit], into: list[VisitRecord]
    ) -> None:
        """All visits for some shapes after the other, each beside plain decoding."""
        self.tried.shapes |= {shape.name: shape for shape in shapes}
        together = self.settings.together if into is self.tried.screening else len(shapes)
        questions = sum(len(visit.group.questions) for visit in visits)
        pools = [shapes[start : start + together] for start in range(0, len(shapes), together)]
        with self.progress.task(
            title, questions * (len(shapes) + len(pools)), unit="answers"
        ) as task:
            for pool in pools:
                self._measure_pool(pool, visits, into, task)

    def _measure_pool(
        self, pool: list[Shape], visits: Sequence[Visit], into: list[VisitRecord], task: Task
    ) -> None:
        arms: ShapeArms | None = None
        try:
            for number, visit in enumerate(visits):
                if all(shape.name in self.tried.failed for shape in pool):
                    return
                place = self._num_records
                self._num_records += 1
                if place not in self.known:
                    arms = arms or self._open(pool, visits[number:])
                    self.known[place] = self._visit(arms, visit, place)
                self._take(self.known[place], into, task)
        finally:
            if arms is not None:
                arms.close()

    def _open(self, pool: list[Shape], visits: Sequence[Visit]) -> ShapeArms:
        """Engines for these shapes, warmed up by visits that do not count."""
        try:
            arms = ShapeArms(
                self.target,
                self.head,
                [shape for shape in pool if shape.name not in self.tried.failed],
                self.settings,
                self.questions,
                target_name=self.target_name,
                clock=self.clock,
            )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.target.device} has no room for {len(pool)} shapes at once; lower together, "
                "concurrency or max_tokens, or for the final finalists."
            ) from error
        for visit in visits[: self.settings.warm_up]:
            arms.measure(visit, self._concurrency(visit), without={})
        return arms

    def _concurrency(self, visit: Visit) -> int:
        return self.load.concurrency[visit.group.task]

    def _visit(self, arms: ShapeArms, visit: Visit, place: int) -> VisitRecord:
        record = VisitRecord(
            number=place,
            task=visit.group.task,
            group=visit.group.number,
            repeat=visit.repeat,
            arms=arms.measure(visit, self._concurrency(visit), without=self.tried.failed),
        )
        self.journal.append(VISIT, place, NOWHERE, record.to_json())
        return record

    def _take(self, record: VisitRecord, into: list[VisitRecord], task: Task) -> None:
        into.append(record)
        task.advance(sum(len(measured.answers) for measured in record.arms.values()))
        for name in record.heads:
            pairs = zip(record.arms[name].answers, record.plain.answers, strict=True)
            error = next((own.error for own, plain in pairs if own.error and not plain.error), None)
            if error is not None and name not in self.tried.failed:
                self.tried.failed[name] = error
                self.progress.note(f"{name} is given up: {error}")
        tried = self.tried.screening
        if len(tried) == len(self.load.concurrency) and not _num_successes(tried):
            raise MeasurementError(self.explain_nothing())

    def explain_nothing(self) -> str:
        """Why there are no figures."""
        if self.tried.failed:
            name, error = next(iter(self.tried.failed.items()))
            return f"no shape is left of {len(self.tried.shapes)} that were tried; {name}: {error}"
        answers = [one for record in self.tried.screening for one in record.plain.answers]
        error = next((one.error for one in answers if one.error), "no question was asked.")
        return f"plain decoding answered none of {len(answers)} questions: {error}"

    def cost(self) -> dict[str, Any]:
        """Answers and seconds, warm-up not counted."""
        records = [*self.tried.screening, *self.tried.final]
        measured = [one for record in records for one in record.arms.values()]
        whole = len(Lattice(self.settings).all()) * len(self.settings.controllers) + 1
        questions = sum(len(visit.group.questions) for visit in self.load.visits)
        return {
            "visits": len(records),
            "runs": sum(len(one.answers) for one in measured),
            "runs_of_whole_lattice": questions * whole,
            "seconds": sum(one.seconds for one in measured),
        }


def _num_successes(records: Sequence[VisitRecord]) -> int:
    return sum(one.error is None for record in records for one in record.plain.answers)
