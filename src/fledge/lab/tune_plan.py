"""What a tuning would cost, without loading the target."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fledge.contracts.tune_settings import TuneSettings
from fledge.lab.questions import Question
from fledge.lab.select_job import SelectJob
from fledge.lab.tune_shapes import Lattice
from fledge.lab.tune_visits import make_load_visits
from fledge.lab.visits import Visit

MOST_NEIGHBOURS = 6
"""Two in each of three directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """Answers include plain ones and warm-up; each is made of at most `max_tokens` tokens."""

    shapes: int
    """Of the coarse grid."""

    shapes_of_lattice: int
    tasks: int
    questions: int
    visits: int
    rungs: tuple[dict[str, int], ...]
    """So many shapes until so many visits are done."""

    answers_of_grid: int
    answers_of_neighbours: int
    """At most: fewer where the best has fewer, or none that is faster."""

    answers_of_final: int
    """At most: a shape may be a finalist for two reasons."""

    answers: int
    answers_of_whole_lattice: int
    """With each controller on all visits."""

    most_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_tuning(job: SelectJob, settings: TuneSettings) -> TunePlan:
    """Prompts that turn out too long for the target would be left out."""
    questions = [
        Question(prompt=prompt, turn=turn, token_ids=())
        for prompt in job.prompts
        for turn in range(len(prompt.turns))
    ]
    load = make_load_visits(questions, settings)
    lattice = Lattice(settings)
    coarse, whole = len(lattice.coarse()), len(lattice.all())
    rungs = load.rungs(coarse, finalists=settings.finalists)
    grid = done = 0
    for rung in rungs:
        grid += _answers(load.visits[done : rung.num_visits], rung.num_heads, settings)
        done = rung.num_visits
    screening = load.visits[: load.num_screening]
    around = settings.rounds * _answers(screening, MOST_NEIGHBOURS, settings)
    around = around if whole > coarse else 0
    finalists = settings.finalists * len(settings.controllers) + (1 in settings.widths)
    finalists += "adaptive" in settings.controllers
    final = _answers(load.visits, finalists, settings, is_one_pool=True)
    every = sum(len(visit.group.questions) for visit in load.visits)
    return TunePlan(
        shapes=coarse,
        shapes_of_lattice=whole,
        tasks=len({prompt.task for prompt in job.prompts}),
        questions=len(questions),
        visits=len(load.visits),
        rungs=tuple(asdict(rung) for rung in rungs),
        answers_of_grid=grid,
        answers_of_neighbours=around,
        answers_of_final=final,
        answers=grid + around + final,
        answers_of_whole_lattice=every * (whole * len(settings.controllers) + 1),
        most_tokens=(grid + around + final) * settings.max_tokens,
    )


def _answers(
    visits: Sequence[Visit], num_shapes: int, settings: TuneSettings, *, is_one_pool: bool = False
) -> int:
    if not visits:
        return 0
    pools = 1 if is_one_pool else -(-num_shapes // settings.together)
    counted = [*visits, *visits[: settings.warm_up]]
    return sum(len(visit.group.questions) for visit in counted) * (num_shapes + pools)
