"""In which order shapes and prompts meet: visits at each load, and how many each shape makes.

A visit is that of `fledge select`, with a number of requests in flight. At several loads a task
counts once for each of them, so that a mean over tasks is one over loads as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest

from fledge.contracts.tune_settings import TuneSettings
from fledge.lab.questions import Question
from fledge.lab.visits import Group, Rung, Visit, make_groups, make_visits


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVisits:
    """All visits of a tuning."""

    visits: list[Visit]
    concurrency: dict[str, int]
    """Requests in flight, by task as visits name it."""

    num_screening: int
    """Visits that choose the finalists; these are measured on all visits afterwards."""

    def rungs(self, num_shapes: int, *, finalists: int) -> list[Rung]:
        """Halve the shapes and double the visits; every task is visited before the first cut."""
        size, until, rungs = num_shapes, len(self.concurrency), []
        while True:
            # Whoever is left is compared with its neighbours, on the same visits.
            is_last = size <= finalists or until >= self.num_screening
            until = self.num_screening if is_last else until
            rungs.append(Rung(num_heads=size, num_visits=until))
            if is_last:
                return rungs
            size, until = max(finalists, -(-size // 2)), 2 * until


def make_load_visits(questions: Sequence[Question], settings: TuneSettings) -> LoadVisits:
    by_load, concurrency = [], {}
    for load in settings.concurrency:
        groups = []
        for group in make_groups(questions, concurrency=load, seed=settings.seed):
            several = len(settings.concurrency) > 1
            task = f"{group.task}, {load} at once" if several else group.task
            concurrency[task] = load
            groups.append(_filled(replace(group, task=task), load))
        by_load.append(groups)
    groups = [one for turn in zip_longest(*by_load) for one in turn if one is not None]
    visits = make_visits(groups, repeats=settings.repeats)
    least = min(len(visits), 2 * len(concurrency))
    return LoadVisits(
        visits=visits,
        concurrency=concurrency,
        num_screening=max(least, len(visits) // 2),
    )


def _filled(group: Group, load: int) -> Group:
    """A task of few prompts asks them several times at once: the load must be what it says."""
    count = max(load, len(group.questions))
    return replace(group, questions=tuple(islice(cycle(group.questions), count)))
