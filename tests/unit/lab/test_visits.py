"""Who meets which prompts when: balanced orders, fair shares of tasks, and what halving saves."""

from collections import Counter

from fledge.lab.questions import Question
from fledge.lab.suite_prompts import Prompt
from fledge.lab.visits import Rung, count_runs, make_groups, make_visits, plan_rungs


def questions(**counts: int) -> list[Question]:
    return [
        Question(
            prompt=Prompt(id=str(i), task=task, turns=("a", "b")[: 1 + i % 2]),
            turn=turn,
            token_ids=(1,),
        )
        for task, count in counts.items()
        for i in range(count)
        for turn in range(1 + i % 2)
    ]


def test_alone_every_prompt_is_a_group_and_tasks_take_turns() -> None:
    groups = make_groups(questions(a=4, b=2), concurrency=1, seed=0)
    assert [group.task for group in groups] == ["a", "b", "a", "b", "a", "a"]
    assert sorted(len(group.questions) for group in groups) == [1, 1, 1, 2, 2, 2]
    other = make_groups(questions(a=4, b=2), concurrency=1, seed=1)
    assert groups == make_groups(questions(a=4, b=2), concurrency=1, seed=0) != other


def test_under_load_groups_are_as_large_as_the_load() -> None:
    prompts = [
        [len({one.prompt.id for one in group.questions}) for group in groups]
        for groups in (
            make_groups(questions(a=16), concurrency=4, seed=0),
            make_groups(questions(a=8), concurrency=4, seed=0),
            make_groups(questions(a=3), concurrency=4, seed=0),
        )
    ]
    assert prompts == [[8, 8], [4, 4], [3]]


def test_every_arm_is_at_every_place_equally_often() -> None:
    visits = make_visits(make_groups(questions(a=12), concurrency=1, seed=0), repeats=1)
    one_head = [visit.order(["plain", "head"]) for visit in visits]
    assert one_head[:2] == [["plain", "head"], ["head", "plain"]]
    for arms in (["p", "x"], ["p", "x", "y"]):
        for place in range(len(arms)):
            counts = Counter(visit.order(arms)[place] for visit in visits)
            assert set(counts.values()) == {12 // len(arms)}


def test_sixteen_heads_cost_a_third_of_sixteen_whole_runs() -> None:
    visits = make_visits(make_groups(questions(a=40, b=40), concurrency=1, seed=0), repeats=2)
    rungs = plan_rungs(16, visits, finalists=2, is_halving=True)
    assert rungs == [
        Rung(num_heads=n, num_visits=v) for n, v in [(16, 20), (8, 40), (4, 80), (2, 160)]
    ]
    whole = count_runs([Rung(num_heads=16, num_visits=160)], visits)
    assert 0.34 < count_runs(rungs, visits) / whole < 0.36
    assert plan_rungs(16, visits, finalists=2, is_halving=False) == [
        Rung(num_heads=16, num_visits=160)
    ]


def test_no_head_is_given_up_before_every_task_was_visited_twice() -> None:
    visits = make_visits(make_groups(questions(a=3, b=3, c=3), concurrency=1, seed=0), repeats=1)
    rungs = plan_rungs(16, visits, finalists=2, is_halving=True)
    assert [rung.num_visits for rung in rungs] == [6, 6, 6, 9]
    assert count_runs(rungs[:1] * 2, visits) == count_runs(rungs[:1], visits)
