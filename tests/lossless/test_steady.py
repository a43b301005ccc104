"""Cycles that run ahead of the host say what one cycle after the other says.

On a CPU nothing is captured, but everything else is the same: requests live in fixed places, the
head reads a fixed number of tokens, the outcome of a cycle is read after the next one was started,
and requests that have ended run one cycle too many.

Catches: a token read twice or not at all, entries left in the wrong place by places that are empty
or have ended, memory given away while a cycle still writes to it, and answers mixed up.
"""

from dataclasses import replace
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.pass_times import PassCurve, PassTimes
from fledge.engine.sequence import Sequence
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.testing import tiny_head
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import greedy, pair, prompts, token_ids

SHAPES = {"chain": (4, 1, 4), "tree": (3, 3, 9), "large": (5, 4, 24)}


def ahead(shape: str = "tree", **changes: Any) -> EngineSettings:
    depth, width, budget = SHAPES[shape]
    tree = TreeSettings(depth=depth, width=width, budget=budget)
    return EngineSettings(tree=tree, graphs="on", **changes)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("llama", "chain"), ("gemma3-hybrid", "tree"), ("olmo3-hybrid", "large")],
)
def test_greedy(architecture: str, shape: str) -> None:
    _, target = pair(architecture)
    asked = prompts()
    wanted = greedy(architecture, asked)
    engine = Engine(target, tiny_head(target, draft_vocab_size=97), ahead(shape))
    for count in (1, 7):
        assert (
            token_ids(engine.generate(asked[:count], SamplingParams(max_tokens=24)))
            == wanted[:count]
        )
    engine.check_integrity()


@pytest.mark.parametrize("flags", [{"num_heads": 8, "num_kv_heads": 4}, {"num_kv_heads": 1}])
def test_heads_with_other_attention_than_the_targets(flags: dict[str, int]) -> None:
    _, target = pair("llama")
    asked = prompts(4)
    engine = Engine(target, tiny_head(target, draft_vocab_size=97, **flags), ahead())
    answers = engine.generate(asked, SamplingParams(max_tokens=12))
    assert token_ids(answers) == greedy("llama", asked, max_tokens=12)
    engine.check_integrity()


def test_greedy_without_a_head() -> None:
    _, target = pair("llama")
    asked = prompts()
    engine = Engine(target, settings=ahead())
    answers = engine.generate(asked, SamplingParams(max_tokens=24))
    assert token_ids(answers) == greedy("llama", asked)


def test_waiting_for_every_cycle_says_the_same() -> None:
    _, target = pair("llama")
    asked = prompts()[:3]
    head = tiny_head(target, draft_vocab_size=97)
    engine = Engine(target, head, ahead("chain"), waits_for_cycles=True)
    running = [engine.add(engine.make_request(one, SamplingParams(max_tokens=12))) for one in asked]
    while not all(seq.has_ended for seq in running):
        engine.step()
        assert not engine._cycle.ahead._steady.num_in_flight
    assert [seq.output_ids for seq in running] == [ids[:12] for ids in greedy("llama", asked)]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_drafts_are_accepted(forced: tuple[Target, Eagle3Head], shape: str) -> None:
    target, head = forced
    asked = [[CIRCLE[start]] * 3 for start in (0, 7, 15, 22, 29)]
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    engine = Engine(target, head, ahead(shape))
    answers = engine.generate(asked, params)
    assert token_ids(answers) == token_ids(plain)
    usual = Engine(target, head, replace(ahead(shape), graphs="off")).generate(asked, params)
    for answer, other in zip(answers, usual, strict=True):
        assert answer.stats.accept_length > 2
        assert answer.stats.cycles == other.stats.cycles
        assert answer.stats.offered_at_depth == other.stats.offered_at_depth
        assert answer.stats.accepted_at_depth == other.stats.accepted_at_depth


MIXES: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


@pytest.mark.parametrize("mixes", [MIXES[:2], MIXES], ids=["free", "filtered"])
def test_sampled_and_greedy_side_by_side(mixes: tuple[dict[str, Any], ...]) -> None:
    _, target = pair("llama")
    asked = prompts()
    params = [
        SamplingParams(max_tokens=9 + 2 * i, seed=i, **mixes[i % len(mixes)])
        for i in range(len(asked))
    ]
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    head = tiny_head(target, draft_vocab_size=97)
    for settings in (ahead(), ahead("chain", max_requests=3)):
        assert token_ids(Engine(target, head, settings).generate(asked, params)) == token_ids(plain)
    assert token_ids(Engine(target, settings=ahead()).generate(asked, params)) == token_ids(plain)


def test_little_memory(forced: tuple[Target, Eagle3Head]) -> None:
    """Requests that have to give up their memory go on later, with the same text."""
    target, head = forced
    asked = [[CIRCLE[start]] * 20 for start in range(6)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    engine = Engine(target, head, ahead(cache_tokens=240, block_size=4))
    assert token_ids(engine.generate(asked, params)) == token_ids(plain)
    assert engine.stats.num_preemptions
    engine.check_integrity()


def test_requests_come_go_and_are_taken_away(forced: tuple[Target, Eagle3Head]) -> None:
    target, head = forced
    engine = Engine(target, head, ahead(max_requests=4))
    plain = Engine(target, settings=EngineSettings(graphs="off"))

    def request(start: int, max_tokens: int, *, speculate: bool = True) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=speculate)
        return engine.add(engine.make_request([CIRCLE[start]] * 4, params))

    first = [request(0, 50), request(3, 23, speculate=False), request(6, 70)]
    for _ in range(4):
        engine.step()
    gone, late = first.pop(), [request(9, 31), request(12, 5), request(15, 44)]
    engine.abort([gone])
    for _ in range(3):
        engine.step()
    engine.preempt(first[0])
    while engine.has_work:
        engine.step()
    for seq in [*first, *late]:
        asked, params = list(seq.request.prompt_token_ids), seq.request.params
        assert seq.output_ids == token_ids(plain.generate([asked], params))[0]
    assert first[1].cycles == 22, "a request without drafts says one token a cycle"
    engine.check_integrity()


def test_what_cannot_run_ahead_runs_beside(forced: tuple[Target, Eagle3Head]) -> None:
    """Penalties and logprobs need the host: such requests have passes of their own meanwhile."""
    target, head = forced
    asked = [[CIRCLE[start]] * 4 for start in range(4)]
    params = [
        SamplingParams(max_tokens=12, top_p=0.9, temperature=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=17, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=9, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True),
    ]
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    answers = Engine(target, head, ahead()).generate(asked, params)
    assert token_ids(answers) == token_ids(plain)
    assert answers[2].logprobs is not None
    assert len(answers[2].logprobs) == 9
    assert answers[3].stats.accept_length > 2, "drafted for, whatever the others ask for"


def test_the_end_of_the_context(forced: tuple[Target, Eagle3Head]) -> None:
    target, head = forced
    asked = [[CIRCLE[0]] * (target.context_len - 40)]
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    answers = Engine(target, head, ahead("large")).generate(asked, params)
    assert token_ids(answers) == token_ids(plain)


def test_the_controller_plans_cycles_that_run_ahead(forced: tuple[Target, Eagle3Head]) -> None:
    """Plain cycles, probes and drafts in turns: the controller has times that make it draft."""
    target, head = forced
    times = PassTimes(PassCurve([1, 64], [1.0, 1.1]), PassCurve([1, 64], [0.01, 0.02]))
    engine = Engine(target, head, ahead("large"), times=times)
    asked = [[CIRCLE[start]] * 4 for start in range(5)]
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    assert token_ids(engine.generate(asked, params)) == token_ids(plain)
    assert engine.stats.num_drafts
