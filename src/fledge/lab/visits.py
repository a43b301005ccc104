"""In which order heads and prompts meet.

Prompts that are answered together are a *group*: one prompt where one request is in flight, else
twice as many prompts of one task as there are requests in flight. A *visit* asks all heads that
are left, and plain decoding, the questions of one group, one after the other. Which of them begins
changes from visit to visit, and every second visit goes through them backwards, so that whatever
drifts on the machine meets all alike.

Visits go through the tasks in turns, and through all groups before any group is repeated: whenever
one stops, all tasks have been measured about equally often.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fledge.lab.questions import Question

PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Questions of one task that are answered together."""

    task: str
    number: int
    """Within its task."""

    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        return f"{self.task} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    number: int
    group: Group
    repeat: int

    def order(self, arms: Sequence[str]) -> list[str]:
        """The arms, turned and reversed by the number of the visit."""
        start = self.number // 2 % len(arms)
        turned = [*arms[start:], *arms[:start]]
        return turned[::-1] if self.number % 2 else turned


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """So many heads go on until so many visits are done."""

    num_heads: int
    num_visits: int


def make_groups(questions: Sequence[Question], *, concurrency: int, seed: int) -> list[Group]:
    """Groups of all tasks, in turns; prompts of a task in an order drawn by the seed."""
    tasks: dict[str, dict[str, list[Question]]] = {}
    for question in questions:
        prompts = tasks.setdefault(question.prompt.task, {})
        prompts.setdefault(question.prompt.id, []).append(question)
    by_task = []
    for task, prompts in tasks.items():
        names = list(prompts)
        random.Random(f"{seed} {task}").shuffle(names)
        size = _group_size(len(names), concurrency)
        chunks = [names[start : start + size] for start in range(0, len(names), size)]
        by_task.append(
            [
                Group(
                    task=task,
                    number=number,
                    questions=tuple(one for name in chunk for one in prompts[name]),
                )
                for number, chunk in enumerate(chunks)
            ]
        )
    longest = max(map(len, by_task), default=0)
    return [groups[i] for i in range(longest) for groups in by_task if i < len(groups)]


def _group_size(num_prompts: int, concurrency: int) -> int:
    if concurrency == 1:
        return 1
    # Groups as large as the load they stand for come first, intervals over several groups second.
    return concurrency * (2 if num_prompts >= 4 * concurrency else 1)


def make_visits(groups: Sequence[Group], *, repeats: int) -> list[Visit]:
    return [
        Visit(number=repeat * len(groups) + i, group=group, repeat=repeat)
        for repeat in range(repeats)
        for i, group in enumerate(groups)
    ]


def plan_rungs(
    num_heads: int, visits: Sequence[Visit], *, finalists: int, is_halving: bool
) -> list[Rung]:
    """Halve the heads until the finalists are left, and double the visits each time.

    No head is given up before every task was visited twice.
    """
    sizes = [num_heads]
    while is_halving and sizes[-1] > finalists:
        sizes.append(max(finalists, -(-sizes[-1] // 2)))
    num_tasks = len({visit.group.task for visit in visits})
    least = min(len(visits), 2 * num_tasks)
    return [
        Rung(num_heads=size, num_visits=max(least, -(-len(visits) // 2 ** (len(sizes) - 1 - i))))
        for i, size in enumerate(sizes)
    ]


def count_runs(rungs: Sequence[Rung], visits: Sequence[Visit]) -> int:
    """Answers that are made, plain ones included."""
    done = total = 0
    for rung in rungs:
        questions = sum(len(one.group.questions) for one in visits[done : rung.num_visits])
        total += questions * (rung.num_heads + 1)
        done = max(done, rung.num_visits)
    return total
