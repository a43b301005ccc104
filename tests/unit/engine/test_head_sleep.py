"""When a head sleeps, what looking after it costs, and when it is awake again.

Catches: a useless head that is paid for again and again, exams that cost more than their share or
never end, and a head that is of use again and is not found out.
"""

from typing import Any

import numpy as np
import pytest

from fledge import Engine, SamplingParams
from fledge.contracts.settings import TreeSettings
from fledge.engine.acceptance_model import AcceptanceModel
from fledge.engine.cycle_costs import CycleCosts
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load, Menu
from fledge.engine.graphs import Graphs
from fledge.engine.head_sleep import SHARE, HeadSleep
from fledge.engine.outlook import Planner
from fledge.engine.pass_times import PassCurve, PassTimes
from fledge.testing import tiny_head
from tests.lossless.support import greedy, pair, prompts, token_ids
from tests.unit.engine.captured_simulation import CAPTURED_MACHINES, CapturedRun
from tests.unit.engine.fake_graphs import capturing
from tests.unit.engine.test_capture_policy import flat_times, settings

MACHINE = CAPTURED_MACHINES["as measured"]
CHAIN = DraftPlan(3, 1, 3)
MENU = Menu((CHAIN,), frozenset([CHAIN]), capture_s=0.05)
LOAD = Load(1, context_tokens=100, unread=(2,), num_places=1, menu=MENU)


@pytest.mark.parametrize("num_requests", [1, 8, 32, 256])
def test_a_useless_head_costs_next_to_nothing(num_requests: int) -> None:
    """Over 5,000 cycles: it sleeps once, and exams take three in a thousand of the time."""
    run = CapturedRun(MACHINE, right=0.0)
    while not run.controller.is_asleep:
        run.serve(num_requests)
    # One draft costs so little here that many have to be refused before that is sure.
    assert run.num_told <= 2000 * num_requests
    before = run.num_told
    rates = [run.serve(num_requests) for _ in range(20)]
    state: Any = run.controller.state()
    assert np.mean(rates) / MACHINE.plain_rate(num_requests) > 0.997
    assert state["num_sleeps"] == 1
    assert 1 <= state["num_exams"] <= 20
    assert run.num_told - before <= state["num_exams"] * 8 * num_requests
    assert run.num_plain > 0.9 * 20 * 255 * num_requests


def test_a_useless_head_sleeps_on_whatever_the_number_of_requests() -> None:
    """Exams cost less and less, and no size of batch is a reason for one."""
    run, rates = CapturedRun(MACHINE, right=0.0), []
    while not run.controller.is_asleep:
        run.serve(1)
    run.num_told = 0
    for num_requests in (1, 8, 32, 256, 8):
        rates += [run.serve(num_requests) / MACHINE.plain_rate(num_requests) for _ in range(20)]
    state: Any = run.controller.state()
    assert (state["head"], state["num_sleeps"]) == ("asleep", 1)
    assert np.mean(rates[:20]) > 0.998
    assert np.mean(rates[20:]) > 0.999
    assert run.num_told < 0.01 * run.num_plain


@pytest.mark.parametrize("num_requests", [1, 8, 32, 256])
def test_a_head_that_is_of_use_again_is_found_out(num_requests: int) -> None:
    """By the first requests that come when an exam can be paid for: 2,000 cycles at most."""
    run = CapturedRun(MACHINE, right=0.0)
    while not run.controller.is_asleep:
        run.serve(num_requests)
    run.right = 0.777
    num_batches = 0
    while run.controller.is_asleep:
        run.serve(num_requests)
        num_batches += 1
    assert num_batches <= 8
    run.serve(num_requests)  # the first that all of are told
    assert run.serve(num_requests) > 1.03 * MACHINE.plain_rate(num_requests)
    assert run.controller.state()["head"] == "awake"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CAPTURED_MACHINES)
def test_a_good_head_never_sleeps(name: str, seed: int) -> None:
    """Not even where drafts for so many requests do not pay."""
    run = CapturedRun(CAPTURED_MACHINES[name], seed)
    run.rates((256, 1), rounds=2)
    assert run.controller.state()["num_sleeps"] == 0


class Judged:
    """A head that is told what cycles bring, one second each without drafts."""

    def __init__(self) -> None:
        sizes = [1, 64]
        times = PassTimes(PassCurve(sizes, [1.0, 1.0]), PassCurve(sizes, [0.2, 0.2]))
        tree = TreeSettings(depth=3, width=1, budget=3)
        planner = Planner(tree, AcceptanceModel(tree), CycleCosts(times), 64)
        self.sleep = HeadSleep(planner)

    def cycles(
        self, count: int, plan: DraftPlan = PLAIN, num_right: int = 0, *, num_trees: int = 1
    ) -> None:
        for i in range(count):
            is_right = int(i < num_right)
            report = CycleReport(
                plan=plan,
                load=LOAD,
                target_s=1.0,
                draft_s=0.0 if plan.is_plain else 0.6,
                other_s=0.0,
                emitted=1 + is_right,
                reached_D=() if plan.is_plain else (num_trees,),
                accepted_D=() if plan.is_plain else (is_right,),
            )
            self.sleep.observe(report)

    def fall_asleep(self) -> None:
        self.cycles(20, CHAIN)
        self.sleep.judge(LOAD)
        assert self.sleep.is_asleep

    def begin_exam(self) -> None:
        self.fall_asleep()
        self.cycles(round(4.2 / SHARE))
        assert self.sleep.meets_requests(has_room=True)
        assert self.sleep.is_exam


def test_it_takes_evidence_to_fall_asleep() -> None:
    judged = Judged()
    judged.cycles(7, CHAIN)
    judged.sleep.judge(LOAD)
    assert not judged.sleep.is_asleep, "too few were seen"
    judged.cycles(13, CHAIN, num_right=4)
    judged.sleep.judge(LOAD)
    assert not judged.sleep.is_asleep, "one of five right brings what it costs"
    judged.cycles(300, CHAIN)
    judged.sleep.judge(LOAD)
    assert judged.sleep.is_asleep, "what was long ago counts less and less"


def test_an_exam_has_to_be_paid_for() -> None:
    judged = Judged()
    judged.fall_asleep()
    judged.cycles(round(3 / SHARE))
    assert not judged.sleep.meets_requests(has_room=True)
    judged.cycles(round(2 / SHARE))
    assert not judged.sleep.meets_requests(has_room=False), "there is no memory for drafts"
    assert judged.sleep.meets_requests(has_room=True)
    assert judged.sleep.plan(LOAD).depth == 3


def test_four_wrong_trees_end_an_exam() -> None:
    judged = Judged()
    judged.begin_exam()
    plans = [judged.sleep.plan(LOAD) for _ in range(6)]
    assert [plan.is_plain for plan in plans] == [False] * 4 + [True] * 2, "their outcome is awaited"
    judged.cycles(3, CHAIN)
    assert judged.sleep.is_exam
    judged.cycles(1, CHAIN)
    assert judged.sleep.is_asleep
    assert not judged.sleep.meets_requests(has_room=True), "what it cost is to be saved again"


def test_trees_of_requests_that_ended_are_asked_for_again() -> None:
    judged = Judged()
    judged.begin_exam()
    plans = [judged.sleep.plan(LOAD) for _ in range(4)]
    assert not any(plan.is_plain for plan in plans)
    judged.cycles(3, CHAIN)
    judged.cycles(1, CHAIN, num_trees=0)
    assert judged.sleep.is_exam
    assert not judged.sleep.plan(LOAD).is_plain
    assert judged.sleep.plan(LOAD).is_plain, "one was missing"
    judged.cycles(1, CHAIN)
    assert judged.sleep.is_asleep


def test_exams_in_vain_become_rarer() -> None:
    judged, waited = Judged(), list[int]()
    judged.begin_exam()
    for _ in range(6):
        judged.cycles(4, CHAIN)
        assert judged.sleep.is_asleep
        count = 0
        while not judged.sleep.meets_requests(has_room=True):
            judged.cycles(10)
            count += 10
        waited.append(count)
    # The first is paid for in part by what was left of the time before.
    assert waited[0] < waited[1]
    assert [round(later / waited[1], 1) for later in waited[1:]] == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_right_one_makes_an_exam_longer_and_several_end_it() -> None:
    judged = Judged()
    judged.begin_exam()
    judged.cycles(4, CHAIN, num_right=2)
    assert judged.sleep.is_exam
    assert not judged.sleep.plan(LOAD).is_plain
    judged.cycles(8, CHAIN, num_right=4)
    assert judged.sleep.state()["head"] == "awake"
    assert judged.sleep.meets_requests(has_room=False), "everybody is told to a head that is awake"


def test_an_exam_that_nobody_comes_to_ends() -> None:
    judged = Judged()
    judged.begin_exam()
    turns = [judged.sleep.meets_requests(has_room=True) for _ in range(9)]
    assert turns == [True] * 8 + [False]
    judged = Judged()
    judged.begin_exam()
    judged.sleep.plan(LOAD)
    judged.cycles(500)
    assert judged.sleep.is_asleep, "who was drafted for has gone"


def test_an_exam_pays_for_its_capture() -> None:
    judged = Judged()
    judged.begin_exam()
    dear = Menu((CHAIN,), frozenset(), capture_s=1e3)
    load = Load(1, unread=(2,), num_places=1, menu=dear)
    assert judged.sleep.plan(load).is_plain
    assert judged.sleep.is_asleep
    judged.cycles(round(900 / SHARE))
    assert not judged.sleep.meets_requests(has_room=True)
    judged.cycles(round(200 / SHARE))
    assert judged.sleep.meets_requests(has_room=True)
    assert judged.sleep.plan(load).depth == 3
    nothing = Load(1, unread=(2,), num_places=1, menu=Menu((), frozenset(), capture_s=0.0))
    assert judged.sleep.plan(nothing).is_plain


@pytest.mark.parametrize("num_requests", [1, 4])
def test_an_engine_whose_head_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    """From when it sleeps on, nothing is captured, awaited or told until an exam is paid for."""
    _, target = pair("llama")
    head = tiny_head(target, draft_vocab_size=97)
    engine = Engine(target, head, settings(max_requests=4, copies=False), times=flat_times())
    capturing(engine, monkeypatch)
    monkeypatch.setattr(Graphs, "launch_s", 1e-6)
    controller: Any = engine._controller
    sleep = controller._sleep
    bare, ahead = engine._cycle.ahead.steady.bare, engine._cycle.ahead
    asked, params = prompts()[:num_requests], SamplingParams(max_tokens=24)
    for _ in range(60):
        engine.generate(asked, params)
        if sleep.is_asleep:
            break
    assert sleep.is_asleep
    monkeypatch.setattr(type(sleep), "_can_pay", lambda _: False)
    for _ in range(3):  # what is without features is captured now
        engine.generate(asked, params)
    drains, told, captured = ahead.num_drains, bare.num_told, engine.stats.num_captured
    for _ in range(4):
        assert token_ids(engine.generate(asked, params)) == greedy("llama", asked)
    assert (ahead.num_drains, bare.num_told) == (drains, told)
    assert engine.stats.num_captured == captured
    num_exams = sleep.num_exams
    monkeypatch.setattr(type(sleep), "_can_pay", lambda _: True)
    engine.generate(asked, SamplingParams(max_tokens=1))
    assert sleep.num_exams == num_exams, "nobody is drafted for who ends with its first token"
    assert token_ids(engine.generate(asked, params)) == greedy("llama", asked)
    assert sleep.num_exams > num_exams
    assert bare.num_told > told
    assert ahead.num_drains == drains
    engine.check_integrity()
