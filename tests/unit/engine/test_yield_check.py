"""Rates that are expected of drafting are lowered by what cycles of the same size fell short of."""

from dataclasses import replace

import pytest

from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load, Menu
from fledge.engine.yield_check import YieldCheck

PLAN = DraftPlan(3, 1, 24)
MENU = Menu((PLAN,), frozenset({PLAN}), capture_s=0.1)


def load(num_places: int) -> Load:
    return Load(num_requests=num_places, num_places=num_places, menu=MENU)


def report(where: Load, emitted: int, seconds: float = 0.01) -> CycleReport:
    return CycleReport(
        plan=PLAN, load=where, target_s=seconds, draft_s=0.0, other_s=0.0, emitted=emitted
    )


def test_what_fell_short_is_not_believed_again() -> None:
    yields, where = YieldCheck(), load(8)
    assert yields.share(where) == 1.0
    for _ in range(300):
        yields.observe(report(where, 18), expected_rate=2000.0)
    assert yields.share(where) == pytest.approx(0.9, abs=0.02)
    for _ in range(300):
        yields.observe(report(where, 20), expected_rate=2000.0)
    assert yields.share(where) == pytest.approx(1.0, abs=0.01)


def test_a_few_cycles_say_little_and_luck_says_nothing() -> None:
    yields, where = YieldCheck(), load(8)
    yields.observe(report(where, 10), expected_rate=2000.0)
    assert yields.share(where) > 0.9
    for _ in range(300):
        yields.observe(report(where, 40), expected_rate=2000.0)
    assert yields.share(where) == 1.0


def test_cycles_whose_requests_all_failed_say_nothing() -> None:
    yields, where = YieldCheck(), load(1)
    yields.observe(report(where, 0), expected_rate=2000.0)
    assert yields.share(where) == 1.0


def test_sizes_answer_for_themselves() -> None:
    yields = YieldCheck()
    for _ in range(300):
        yields.observe(report(load(256), 18), expected_rate=2000.0)
    assert yields.share(load(256)) < 0.95
    assert yields.share(load(128)) == 1.0


def test_cycles_that_are_not_captured_are_left_to_the_models() -> None:
    yields, where = YieldCheck(), Load(num_requests=5)
    for _ in range(300):
        yields.observe(report(where, 18), expected_rate=2000.0)
    assert yields.share(where) == 1.0


def test_without_drafts_it_is_forgotten() -> None:
    yields, where = YieldCheck(), load(8)
    for _ in range(300):
        yields.observe(report(where, 18), expected_rate=2000.0)
    for _ in range(2000):
        yields.observe(replace(report(where, 8), plan=PLAIN), expected_rate=900.0)
    assert yields.share(where) > 0.99


def test_a_pause_of_the_host_is_no_reason() -> None:
    yields, where = YieldCheck(), load(8)
    for _ in range(100):
        yields.observe(report(where, 20), expected_rate=2000.0)
    yields.observe(report(where, 20, seconds=5.0), expected_rate=2000.0)
    assert yields.share(where) > 0.97
