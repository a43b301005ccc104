"""What a selection would cost, without loading the target."""

from dataclasses import asdict, dataclass
from typing import Any

from fledge.contracts.select_settings import SelectSettings
from fledge.lab.questions import Question
from fledge.lab.select_job import SelectJob
from fledge.lab.visits import Rung, count_runs, make_groups, make_visits, plan_rungs


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectPlan:
    heads: int
    tasks: int
    questions: int
    visits: int
    rungs: tuple[dict[str, int], ...]
    """So many heads until so many visits are done."""

    answers: int
    """Plain ones included; each is made of at most `max_tokens` tokens."""

    answers_without_halving: int
    most_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_selection(job: SelectJob, settings: SelectSettings) -> SelectPlan:
    """Prompts that turn out too long for the target would be left out."""
    questions = [
        Question(prompt=prompt, turn=turn, token_ids=())
        for prompt in job.prompts
        for turn in range(len(prompt.turns))
    ]
    groups = make_groups(questions, concurrency=settings.concurrency, seed=settings.seed)
    visits = make_visits(groups, repeats=settings.repeats)
    heads = len(job.candidates)
    rungs = plan_rungs(heads, visits, finalists=settings.finalists, is_halving=settings.halving)
    answers = count_runs(rungs, visits)
    return SelectPlan(
        heads=heads,
        tasks=len({group.task for group in groups}),
        questions=len(questions),
        visits=len(visits),
        rungs=tuple(asdict(rung) for rung in rungs),
        answers=answers,
        answers_without_halving=count_runs([Rung(num_heads=heads, num_visits=len(visits))], visits),
        most_tokens=answers * settings.max_tokens,
    )
