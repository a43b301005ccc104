"""Which shapes a tuning tries, and how often."""

from dataclasses import replace
from typing import Any

import pytest

from fledge.contracts.errors import ConfigError
from fledge.contracts.tune_settings import TuneSettings
from fledge.lab.questions import Question
from fledge.lab.suite_prompts import Prompt
from fledge.lab.tune_shapes import Lattice, Shape
from fledge.lab.tune_visits import make_load_visits


def numbers(shapes: list[Shape]) -> list[tuple[int, int, int]]:
    return [(one.depth, one.width, one.budget) for one in shapes]


def test_the_lattice_has_each_shape_once() -> None:
    settings = TuneSettings(depths=(1, 2, 10), widths=(1, 4), budgets=(8, 16, 64))
    assert numbers(Lattice(settings).all()) == [
        (1, 1, 1), (1, 4, 4),
        (2, 1, 2), (2, 4, 8), (2, 4, 16), (2, 4, 20),
        (10, 1, 10), (10, 4, 16), (10, 4, 64),
    ]  # fmt: skip
    # Every second value, and the last: depths 1 and 10, widths 1 and 4, budgets 8 and 64.
    assert numbers(Lattice(settings).coarse()) == [
        (1, 1, 1), (1, 4, 4), (10, 1, 10), (10, 4, 64)
    ]  # fmt: skip


def test_the_defaults_reach_beyond_what_heads_are_trained_for() -> None:
    shapes = Lattice(TuneSettings()).all()
    assert {one.depth for one in shapes} >= {8, 9, 10}
    assert len(Lattice(TuneSettings()).coarse()) < len(shapes) / 2


def test_neighbours_are_one_step_away() -> None:
    lattice = Lattice(TuneSettings())
    tree = Shape(depth=6, width=4, budget=32, controller="fixed")
    assert set(numbers(lattice.neighbours(tree))) == {
        (5, 4, 32), (7, 4, 32), (6, 2, 22), (6, 8, 32), (6, 4, 16), (6, 4, 64)
    }  # fmt: skip
    chain = Shape(depth=10, width=1, budget=10, controller="fixed")
    assert set(numbers(lattice.neighbours(chain))) == {(9, 1, 9), (10, 2, 16)}
    # A tree that is smaller than its budget has a wider one beside it, not a larger budget.
    small = Shape(depth=2, width=2, budget=6, controller="fixed")
    assert set(numbers(lattice.neighbours(small))) == {(3, 2, 8), (2, 1, 2), (2, 4, 8)}


def test_visits_at_several_loads() -> None:
    questions = [
        Question(prompt=Prompt(id=str(i), task="sums", turns=("1 + 1?",)), turn=0, token_ids=())
        for i in range(3)
    ]
    settings = TuneSettings(concurrency=(1, 4), repeats=1)
    load = make_load_visits(questions, settings)
    assert load.concurrency == {"sums, 1 at once": 1, "sums, 4 at once": 4}
    sizes = [(visit.group.task, len(visit.group.questions)) for visit in load.visits]
    assert sizes.count(("sums, 1 at once", 1)) == 3
    assert sizes.count(("sums, 4 at once", 4)) == 1, "three prompts, one of them twice"
    alone = make_load_visits(questions, replace(settings, concurrency=(1,)))
    assert (set(alone.concurrency), alone.num_screening) == ({"sums"}, 2)
    rungs = replace(alone, num_screening=8).rungs(20, finalists=3)
    assert [(rung.num_heads, rung.num_visits) for rung in rungs] == [
        (20, 1), (10, 2), (5, 4), (3, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depths": ()}, r"depths is \[\]; name at least one value"),
        ({"widths": (4, 2)}, r"widths is \[4, 2\]; .* in growing order"),
        ({"budgets": (0, 8)}, "budgets is 0; it must be between 1 and 1024"),
        ({"concurrency": (1, 1)}, r"concurrency is \[1, 1\]"),
        ({"widths": (2,), "budgets": (4,), "depths": (5,)}, "budgets end at 4 and depths begin"),
        ({"controllers": ()}, "name one of"),
        ({"controllers": ("fixed", "fixed")}, "name one of"),
        ({"controllers": ("clever",)}, "controller is 'clever'"),
        ({"finalists": 0}, "finalists is 0"),
        ({"together": 0}, "together is 0"),
        ({"rounds": -1}, "rounds is -1"),
        ({"max_tokens": 1}, "max_tokens is 1"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneSettings(**given)
