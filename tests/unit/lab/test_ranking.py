"""Speed-ups and comparisons on made-up visits whose truth is known."""

import numpy as np
import pytest

from fledge.lab.measure import Answer, Measured
from fledge.lab.ranking import accept_length, difference, is_distinguishable, rank_heads, speed_up
from fledge.lab.visit_records import VisitRecord
from fledge.lab.visits import PLAIN


def measured(task: str, tokens: int, seconds: float, cycles: int, *, text: str = "") -> Measured:
    answer = Answer(
        question=f"{task}/1",
        task=task,
        num_prompt_tokens=4,
        token_ids=tuple(range(tokens)),
        text=text,
        cycles=cycles,
        seconds=seconds,
        tokens_before_loop=tokens // 2,
        cycles_before_loop=max(1, cycles // 2),
        seconds_before_loop=seconds,
    )
    return Measured(answers=(answer,), seconds=seconds)


def visits(
    speeds: dict[str, float], *, num_groups: int = 12, repeats: int = 2, noise: float = 0.05
) -> list[VisitRecord]:
    """Two tasks; plain decoding makes a token in a second, heads are faster by their speed."""
    source = np.random.default_rng(3)
    found = []
    for repeat in range(repeats):
        for group in range(num_groups):
            for task in ("a", "b"):
                tokens = int(source.integers(20, 200))
                arms = {PLAIN: measured(task, tokens, tokens * source.normal(1, noise), tokens - 1)}
                for name, speed in speeds.items():
                    seconds = tokens / speed * source.normal(1, noise)
                    arms[name] = measured(task, tokens, seconds, int((tokens - 1) / speed))
                found.append(
                    VisitRecord(number=len(found), task=task, group=group, repeat=repeat, arms=arms)
                )
    return found


def test_heads_are_ranked_by_their_mean_speed_up() -> None:
    records = visits({"slow": 1.2, "fast": 2.0, "middle": 1.6})
    ranked = rank_heads(records, ["slow", "fast", "middle"], seed=0)
    assert [one.head for one in ranked] == ["fast", "middle", "slow"]
    best = ranked[0].speed_up
    assert best is not None
    assert best.value == pytest.approx(2.0, rel=0.05)
    assert best.num_units == 24
    found = difference(records, "fast", "middle", seed=0)
    assert is_distinguishable(found)
    length = accept_length(records, "fast", seed=0)
    assert length is not None
    assert length.value == pytest.approx(2.0, rel=0.05)


def test_two_equal_heads_are_not_told_apart() -> None:
    records = visits({"one": 1.7, "two": 1.7})
    found = difference(records, "one", "two", seed=0)
    assert found is not None
    assert not is_distinguishable(found)
    assert abs(found.value) < 0.1


def test_a_head_that_was_given_up_is_compared_on_the_visits_it_made() -> None:
    records = visits({"fast": 2.0, "slow": 1.3})
    cut = [
        record
        if record.number < 16
        else VisitRecord(
            number=record.number,
            task=record.task,
            group=record.group,
            repeat=record.repeat,
            arms={name: record.arms[name] for name in (PLAIN, "fast")},
        )
        for record in records
    ]
    found = difference(cut, "fast", "slow", seed=0)
    assert found is not None
    assert found.num_units == 16
    assert is_distinguishable(found)


def test_a_task_of_one_group_is_judged_by_its_repeats() -> None:
    found = speed_up(visits({"one": 1.5}, num_groups=1, repeats=4), "one", seed=0)
    assert found is not None
    assert found.num_units == 8
    once = speed_up(visits({"one": 1.5}, num_groups=1, repeats=1), "one", seed=0)
    assert once is not None
    assert once.low is None


def test_what_was_not_measured_has_no_figure() -> None:
    records = visits({"one": 1.5}, num_groups=2)
    assert speed_up(records, "other", seed=0) is None
    assert accept_length(records, "other", seed=0) is None
    assert not is_distinguishable(difference(records, "one", "other", seed=0))
    ranked = rank_heads(records, ["other", "one"], seed=0)
    assert [(one.head, one.speed_up is None) for one in ranked] == [("one", False), ("other", True)]
    early = speed_up(records, "one", seed=0, before_loops=True)
    assert early is not None
    assert early.value == pytest.approx(1.5, rel=0.1)


def test_records_come_back_from_the_journal_as_they_were() -> None:
    record = visits({"same": 1.5, "other": 1.2}, num_groups=1, repeats=1)[0]
    odd = measured(record.task, 5, 1.0, 4, text="another answer")
    record = VisitRecord(
        number=record.number,
        task=record.task,
        group=record.group,
        repeat=record.repeat,
        arms={**record.arms, "other": odd},
    )
    table = record.to_json()
    assert "token_ids" not in table["arms"]["same"]["answers"][0], "equal answers are kept once"
    assert VisitRecord.from_json(record.number, table) == record
