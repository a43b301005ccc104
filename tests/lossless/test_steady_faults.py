"""What goes wrong beside cycles that run ahead of the host: they say the same, and tell the truth.

Catches: a head whose window is shorter than what a cycle says, requests without drafts that fail
for the sake of nodes that only fill a pass, requests that wait for ever beside a batch, and
controllers that are told of drafts nobody had or of less work than there was.
"""

from dataclasses import replace
from typing import Any

import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.controller import FixedController
from fledge.engine.draft_gains import expected_gains
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.ops.tree import Candidates
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import pair, token_ids

Pair = tuple[Target, Eagle3Head]


def settings(depth: int = 3, width: int = 3, budget: int = 9, **changes: Any) -> EngineSettings:
    tree = TreeSettings(depth=depth, width=width, budget=budget)
    return EngineSettings(tree=tree, graphs="on", **changes)


def following(start: int, count: int) -> list[int]:
    return [CIRCLE[(start + 1 + i) % len(CIRCLE)] for i in range(count)]


def params(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def test_a_window_shorter_than_what_a_cycle_says(forced: Pair) -> None:
    target, head = forced
    whole, head.config = head.config, replace(head.config, sliding_window=4)
    try:
        engine = Engine(target, head, settings(8, 1, 8, block_size=2))
        (answer,) = engine.generate([[CIRCLE[0]] * 4], params(40))
    finally:
        head.config = whole
    assert list(answer.token_ids) == following(0, 40)
    engine.check_integrity()


def test_nodes_that_fill_a_pass_fail_nobody(forced: Pair) -> None:
    """Beside a request with drafts, one without gets what is left of the nodes."""
    target, head = forced
    poison = CIRCLE[25]
    weights, whole = target.embedding.weight.data, target.embedding.weight.data[poison].clone()
    weights[poison] = float("nan")
    try:
        engine = Engine(target, head, settings(2, 31, 40))
        asked = [[CIRCLE[0]] * 4, [CIRCLE[3]] * 4]
        answers = engine.generate(asked, [params(8, speculate=False), params(8)])
    finally:
        weights[poison] = whole
    assert token_ids(answers) == [following(0, 8), following(3, 8)]


def test_one_that_needs_the_host_is_served_beside_one_without_drafts(forced: Pair) -> None:
    target, head = forced
    engine = Engine(target, head, settings())
    long = engine.add(engine.make_request([CIRCLE[0]] * 4, params(200, speculate=False)))
    asking = engine.add(engine.make_request([CIRCLE[3]] * 4, params(12, logprobs=1)))
    while not asking.has_ended:
        engine.step()
    assert not long.has_ended
    engine.abort([long])
    assert asking.output_ids == following(3, 12)
    assert not engine.stats.num_drafts


def test_one_that_waits_shares_what_is_there(forced: Pair) -> None:
    """There is no room for all of it, but most of it is the beginning of a request that runs."""
    target, head = forced
    engine = Engine(target, head, settings(cache_tokens=160, block_size=4))
    shared = [CIRCLE[0]] * 80
    first = engine.add(engine.make_request([*shared, CIRCLE[1]], params(50)))
    while len(first.output_ids) < 4:
        engine.step()
    second = engine.add(engine.make_request([*shared, CIRCLE[9]], params(4)))
    while not second.output_ids:
        engine.step()
    assert not first.has_ended
    engine.abort([first, second])
    engine.check_integrity()


def test_one_that_waits_is_read_in_the_pieces_that_windows_have_room_for() -> None:
    """Where it was not, the batch was awaited again and again for a request that never came in."""
    _, target = pair("mistral-sliding")
    few = EngineSettings(
        graphs="on", cache_tokens=60, block_size=4, max_requests=4, max_pass_tokens=64
    )
    engine = Engine(target, settings=few)
    running = [engine.add(engine.make_request([5 + i] * 9, params(60))) for i in range(3)]
    for _ in range(4):
        engine.step()
    asked = list(range(3, 83))
    late = engine.add(engine.make_request(asked, params(4)))
    while not late.has_ended:
        engine.step()
    assert not any(seq.has_ended for seq in running)
    engine.abort(running)
    engine.check_integrity()
    alone = Engine(target, settings=EngineSettings(graphs="off"))
    assert late.output_ids == token_ids(alone.generate([asked], params(4)))[0]


def test_plain_cycles_take_no_room_for_drafts(forced: Pair) -> None:
    target, head = forced
    engine = Engine(target, head, settings(8, 8, 60, block_size=4))
    engine._cycle.choice.controller = Watching(engine.settings.tree, num_plain=1000)
    seq = engine.add(engine.make_request([CIRCLE[0]] * 4, params(30)))
    while not seq.has_ended:
        engine.step()
        held = len(seq.blocks.get(None, ()))
        # What is in flight may have said a token each.
        assert held <= -(-(seq.len + 2) // 4), "more than its tokens need"
    assert seq.output_ids == following(0, 30)


class Watching(FixedController):
    """Decodes plainly for a while, then drafts; keeps what it is told."""

    def __init__(self, tree: TreeSettings, num_plain: int) -> None:
        super().__init__(tree, max_pass_tokens=512)
        self._num_plain = num_plain
        self.reports: list[CycleReport] = []

    @property
    def expects_drafts(self) -> bool:
        return self._num_plain <= 0

    def choose(self, load: Load) -> DraftPlan:
        self._num_plain -= 1
        if self._num_plain >= 0:
            return PLAIN
        return replace(super().choose(load), is_measured=True)

    def observe(self, report: CycleReport) -> None:
        self.reports.append(report)


class ByTurns(Watching):
    """Drafts deep and not so deep chains."""

    def choose(self, load: Load) -> DraftPlan:
        plan = super().choose(load)
        if plan.is_plain or len(self.reports) % 2:
            return plan
        return replace(plan, depth=1, nodes=1)


def watched(
    forced: Pair, asked: list[SamplingParams], num_plain: int = 0, **changes: Any
) -> list[CycleReport]:
    engine = Engine(*forced, replace(settings(), **changes))
    watching = Watching(engine.settings.tree, num_plain)
    engine._cycle.choice.controller = watching
    engine.generate([[CIRCLE[i]] * 4 for i in range(len(asked))], asked)
    return [one for one in watching.reports if not one.plan.is_plain]


def test_catching_up_is_part_of_what_drafting_costs(forced: Pair) -> None:
    first, second, *_ = watched(forced, [params(40)], num_plain=20)
    assert first.num_extended > 15
    assert second.num_extended <= 4
    assert first.is_catching_up
    assert not second.is_catching_up


def test_what_a_deeper_plan_said_is_no_catching_up(forced: Pair) -> None:
    """Whoever took it for that would think that catching up takes no time."""
    target, head = forced
    engine = Engine(target, head, settings(5, 1, 5))
    watching = ByTurns(engine.settings.tree, num_plain=20)
    engine._cycle.choice.controller = watching
    engine.generate([[CIRCLE[0]] * 4], params(60))
    first, *others = (one for one in watching.reports if not one.plan.is_plain)
    assert first.is_catching_up
    assert max(one.num_extended for one in others if one.plan.depth == 1) == 6
    assert not any(one.is_catching_up for one in others)


def test_requests_without_drafts_are_not_taken_for_drafted_ones(forced: Pair) -> None:
    asked = [params(30), params(30), params(40, speculate=False)]
    reports = watched(forced, asked)
    assert {one.num_drafted for one in reports if one.load.num_requests == 3} == {2}
    assert all(one.num_drafted for one in reports)


def test_gains_are_those_of_requests_with_drafts(forced: Pair) -> None:
    """Neither places that nobody has nor requests without drafts make them smaller."""
    for asked in ([params(20)] * 5, [params(20)] + [params(20, speculate=False)] * 3):
        ahead, usual = watched(forced, asked)[0], watched(forced, asked, graphs="off")[0]
        assert ahead.gains is not None
        assert usual.gains is not None
        assert torch.allclose(ahead.gains, usual.gains, atol=1e-5)


def test_gains_of_a_part_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    scores_BC = -5 * torch.rand(4, 6, generator=generator)
    parents_BC = torch.tensor([-1, -1, 0, 0, 1, 1]).repeat(4, 1)
    zeros_BC = torch.zeros_like(parents_BC)
    none_BC = torch.full((3, 6), float("-inf"))

    def gains(scores_BC: torch.Tensor) -> torch.Tensor:
        count = scores_BC.shape[0]
        rows_BC = (parents_BC[:1].repeat(count, 1), zeros_BC[:1].repeat(count, 1))
        candidates = Candidates(
            tokens_BC=rows_BC[1], scores_BC=scores_BC, logprobs_BC=scores_BC, parents_BC=rows_BC[0]
        )
        return expected_gains(candidates, depth=2, width=2)

    assert torch.equal(gains(torch.cat([scores_BC, none_BC])), gains(scores_BC))
