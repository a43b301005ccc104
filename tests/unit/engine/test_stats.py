"""Figures that add up: of a request, of the engine, and what somebody else has counted.

Catches: drafts counted that were not verified, acceptance at the wrong depth, times that begin or
end at the wrong moment, tokens of re-read prompts counted as drafted ones, and requests counted
twice or not at all. A clock that moves by one with every pass makes times exact.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.outputs import EngineStats
from fledge.engine import commits, sequence
from fledge.engine.draft_plan import CycleReport, DraftPlan, Load
from fledge.engine.graphs import GraphCounts
from fledge.engine.sequence import Sequence
from fledge.engine.stats import StatsKeeper
from fledge.testing import target_of, tiny_head, tiny_model
from tests.unit.engine.oracle_target import OracleTarget, answer, oracle_drafter, oracle_engine

TREE = TreeSettings(depth=4, width=3, budget=8)
PROMPTS = [[seed, seed + 1, 7, 9 + seed] for seed in range(4)]


def add(engine: Engine, asked: list[int], max_tokens: int = 20, **options: Any) -> Sequence:
    return engine.add(engine.make_request(asked, SamplingParams(max_tokens=max_tokens)), **options)


def run(engine: Engine) -> EngineStats:
    while engine.has_work:
        engine.step()
    return engine.stats


class CountedDrafts:
    """Looks at every tree that is drafted and knows what the target will say."""

    def __init__(self, accuracy: float) -> None:
        self.drafter = oracle_drafter(PROMPTS, accuracy=accuracy, depth=4, width=3, budget=8)
        self._draft, self.drafter.draft = self.drafter.draft, self.count
        self.offered: dict[tuple[int, ...], list[int]] = {}
        self.accepted: dict[tuple[int, ...], list[int]] = {}
        self.num_drafts = self.num_cycles = 0
        self.sizes: list[int] = []

    def count(self, sequences: list[Sequence], plan: DraftPlan) -> Any:
        trees = self._draft(sequences, plan)
        rows = zip(sequences, trees.tokens_BN.tolist(), trees.parents_BN.tolist(), strict=True)
        for i, (seq, tokens, parents) in enumerate(rows):
            size = int(trees.sizes_B[i])
            asked = seq.request.prompt_token_ids
            offered = self.offered.setdefault(asked, [0] * 4)
            accepted = self.accepted.setdefault(asked, [0] * 4)
            right = answer(asked, 60)[len(seq.output_ids) :]
            node = depth = 0
            while children := [c for c in range(1, size) if parents[c] == node]:
                offered[depth] += 1
                node = next((c for c in children if tokens[c] == right[depth]), 0)
                if not node:
                    break
                accepted[depth] += 1
                depth += 1
            self.num_drafts += size - 1
        self.num_cycles += len(sequences)
        self.sizes.append(sum(trees.sizes_B.tolist()) - len(sequences))
        return trees


def summed(counts: dict[tuple[int, ...], list[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts.values(), strict=True)]


def padded(counts: tuple[int, ...]) -> list[int]:
    return [*counts, *[0] * (4 - len(counts))]


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_acceptance_by_depth_is_what_one_counts_by_hand(accuracy: float) -> None:
    counted = CountedDrafts(accuracy)
    engine, target = oracle_engine(drafter=counted.drafter, tree=TREE)
    sequences = [add(engine, one, 17 + i) for i, one in enumerate(PROMPTS)]
    stats = run(engine)
    assert padded(stats.offered_at_depth) == summed(counted.offered)
    assert padded(stats.accepted_at_depth) == summed(counted.accepted)
    for seq in sequences:
        own = seq.completion().stats
        assert padded(own.offered_at_depth) == counted.offered[seq.request.prompt_token_ids]
        assert padded(own.accepted_at_depth) == counted.accepted[seq.request.prompt_token_ids]
    if accuracy == 0.0:
        assert stats.acceptance_at_depth == (0.0,)
        assert stats.accept_length == 1.0
    if accuracy == 1.0:
        assert set(stats.acceptance_at_depth) == {1.0}
        assert stats.accept_length is not None
        assert stats.accept_length > 4
    assert stats.num_drafts == counted.num_drafts
    assert stats.num_request_cycles == counted.num_cycles == sum(seq.cycles for seq in sequences)
    assert stats.num_emitted == sum(len(seq.output_ids) - 1 for seq in sequences)
    num_read = sum(len(one) for one in PROMPTS) - stats.num_reused_tokens
    rows = stats.num_request_cycles + stats.num_drafts + num_read
    assert sum(target.num_rows) - 1 == rows, "every row of every pass is accounted for"
    assert stats.num_passes == len(target.num_rows) - 1


def test_budgets_count_the_drafts_of_passes_that_decode() -> None:
    counted = CountedDrafts(0.6)
    engine, _ = oracle_engine(drafter=counted.drafter, tree=TREE)
    for one in PROMPTS:
        add(engine, one, 15)
    stats = run(engine)
    assert list(stats.budgets) == sorted(stats.budgets)
    assert sum(stats.budgets.values()) == len(counted.sizes)
    for size, count in stats.budgets.items():
        assert counted.sizes.count(size) == count


def test_drafts_are_counted_where_only_some_have_room_for_them() -> None:
    """A real head, two candidates a request; in the end there are blocks for two requests only."""
    target = target_of(tiny_model("llama"))
    tree = TreeSettings(depth=1, width=2, budget=40)
    settings = EngineSettings(tree=tree, max_requests=4, block_size=4, cache_tokens=72)
    engine = Engine(target, tiny_head(target), settings)
    rows = []
    forward = target.forward

    def counted(packed: Any, *args: Any, **options: Any) -> Any:
        rows.append(packed.num_tokens)
        return forward(packed, *args, **options)

    target.forward = counted
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]]
    engine.generate(prompts, params)
    stats = engine.stats
    assert stats.num_preemptions == 0
    assert sum(rows) == stats.num_request_cycles + stats.num_drafts + 12
    del target.forward


class Clock:
    """Moves by one with every pass of the target."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: OracleTarget) -> None:
        self.now = 100.0
        forward = target.forward

        def ticking(*args: Any, **options: Any) -> Any:
            self.now += 1
            return forward(*args, **options)

        target.forward = ticking
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for module in (sequence, commits):
            monkeypatch.setattr(module, "time", clock)


def test_times_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes for the prompt, one for each token after the first, no waiting."""
    engine, target = oracle_engine(max_pass_tokens=10)
    Clock(monkeypatch, target)
    seq = add(engine, [*range(25)], 6)
    run(engine)
    stats = seq.completion().stats
    assert (stats.queue_s, stats.prefill_s, stats.decode_s) == (0, 3, 5)
    assert stats.time_to_first_token_s == 3
    assert stats.time_per_token_s == 1
    assert stats.longest_gap_s == 1
    assert (stats.num_tokens, stats.cycles) == (6, 5)


def test_waiting_counts_until_the_prompt_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = oracle_engine(max_requests=1)
    Clock(monkeypatch, target)
    first = add(engine, [1, 2, 3], 5)
    engine.step()
    second = add(engine, [4, 5], 2)
    run(engine)
    assert first.completion().stats.queue_s == 0
    stats = second.completion().stats
    assert (stats.queue_s, stats.prefill_s, stats.decode_s) == (4, 1, 1)
    assert stats.time_to_first_token_s == 5


def test_a_preempted_request_shows_it_in_its_longest_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted once, it waits two passes; the queue time of its start stays what it was."""
    engine, target = oracle_engine(max_requests=1)
    Clock(monkeypatch, target)
    seq = add(engine, [1, 2, 3], 6)
    for _ in range(3):
        engine.step()
    engine.preempt(seq)
    urgent = add(engine, [9, 9], 2, priority=1)
    stats = run(engine)
    own = seq.completion().stats
    assert urgent.is_finished
    assert (own.queue_s, own.longest_gap_s, own.decode_s) == (0, 3, 7)
    assert (own.num_preemptions, stats.num_preemptions) == (1, 1)
    assert own.cycles == 5, "the pass that reads again yields a token as a cycle does"
    # The engine's cycles are those of decoding requests only.
    assert stats.num_request_cycles == 4 + 1
    assert stats.num_emitted == 4 + 1


def test_prompts_and_what_was_kept_of_them() -> None:
    engine, _ = oracle_engine()
    first = add(engine, [*range(13)], 3)
    run(engine)
    second = add(engine, [*range(10), 50, 51], 3)
    third = add(engine, [*range(13)], 3)
    cancelled = add(engine, [*range(13)], 30)
    engine.step()
    engine.abort([cancelled])
    stats = run(engine)
    reused = [seq.completion().stats.num_prompt_reused for seq in (first, second, third)]
    assert reused == [0, 10, 12]
    assert stats.num_reused_tokens == 22
    assert stats.num_prompt_tokens == 13 + 12 + 13, "of requests that have ended"
    assert stats.num_tokens == 9
    assert (stats.num_finished, stats.num_failed) == (3, 0)


def test_running_waiting_kept_and_evicted() -> None:
    engine, _ = oracle_engine(max_requests=2, cache_tokens=40)
    for seed in range(3):
        add(engine, [seed] * 7, 2)
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 3, 0)
    assert stats.accept_length is None
    engine.step()
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.cache_usage == 0.4, "four of ten blocks"
    stats = run(engine)
    assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0)
    assert stats.num_kept_tokens == 24
    assert stats.num_evicted_blocks == 0
    add(engine, [30] * 33, 2)
    assert run(engine).num_evicted_blocks == 5


def test_bytes_of_the_head_and_its_memory() -> None:
    target = target_of(tiny_model("llama"))
    head = tiny_head(target)
    settings = EngineSettings(cache_tokens=160, max_requests=2, tree=TREE)
    engine = Engine(target, head, settings)
    assert engine.stats.head_bytes == 4 * sum(p.numel() for p in head.parameters())
    engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    # A spare block of 16 tokens beside what was asked for.
    assert engine.stats.head_cache_bytes == (160 + 16) * 4 * (2 * 2 * 8 + 32)
    assert Engine(target, settings=settings).stats.head_bytes == 0


def test_times_of_passes_add_up() -> None:
    def report(**times: float) -> CycleReport:
        load = Load(num_requests=2)
        return CycleReport(DraftPlan(1, 2, 3), load, emitted=4, reached_D=(2, 1), **times)

    keeper = StatsKeeper()
    rng = random.Random(0)
    figures = [{name: rng.random() for name in ("target_s", "draft_s", "other_s")} for _ in "123"]
    for times in figures:
        one = report(**times)
        keeper.count_cycle(CycleReport(**{**_fields(one), "accepted_D": (1, 0)}))
    engine, _ = oracle_engine()
    stats = keeper.report(engine._scheduler, engine._cache, engine._drafter, {}, GraphCounts())
    for name in ("target_s", "draft_s", "other_s"):
        assert getattr(stats, name) == pytest.approx(sum(times[name] for times in figures))
    assert stats.offered_at_depth == (6, 3)
    assert stats.acceptance_at_depth == (0.5, 0.0)
    assert stats.accept_length == 2.0
    assert stats.budgets == {3: 3}


def _fields(report: CycleReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def test_the_engine_measures_its_own_passes() -> None:
    engine, target = oracle_engine()
    add(engine, [1, 2, 3], 4)
    stats = run(engine)
    assert stats.target_s > 0
    assert stats.other_s > 0
    assert stats.num_passes == len(target.num_rows) - 1 == 4
