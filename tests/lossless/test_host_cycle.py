"""Greedy cycles on a CPU that ask for the best token only: the same text as without them, as
without drafts, and as transformers'."""

from collections.abc import Iterator

import pytest

from fledge import Engine, SamplingParams
from fledge.contracts.outputs import Completion
from fledge.engine.chain_planner import AdaptiveChains, ChainPlanners
from fledge.models.target import Target
from fledge.ops.kernel_choice import choose_kernels
from fledge.store.compiler import find_compiler
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.native_cycles import chains_of, knowing_head, meet_a_prefix_again
from tests.lossless.support import MAX_TOKENS, greedy, prompts, token_ids

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
NAME = "llama-tied"


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    with choose_kernels("native"):
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    with choose_kernels("native"):
        target = target_of(tiny_model(NAME))
        assert target.chain_native() is not None
    return target


def _was_used(engine: Engine) -> bool:
    return engine._cycle.host._passes is not None


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen3", "gemma3-hybrid"])
@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_chains_change_nothing(architecture: str, depth: int) -> None:
    other = target_of(tiny_model(architecture))
    asked = prompts(4)
    engine = Engine(other, tiny_head(other) if depth else None, chains_of(depth or 1))
    answers = engine.generate(asked, GREEDY) + engine.generate(asked[:1], GREEDY)
    assert token_ids(answers) == greedy(architecture, [*asked, asked[0]])
    assert _was_used(engine)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 4), (6, 3), (2, 1)])
def test_heads_with_attention_of_another_width(
    target: Target, num_heads: int, num_kv_heads: int
) -> None:
    """More heads than the target has, fewer, and as many as no packed product takes."""
    asked, head = prompts(4), tiny_head(target, num_heads=num_heads, num_kv_heads=num_kv_heads)
    engine = Engine(target, head, chains_of(3))
    assert token_ids(engine.generate(asked, GREEDY)) == greedy(NAME, asked)
    assert _was_used(engine)


def test_good_drafts_are_accepted(target: Target) -> None:
    """A head that reads the target's own logits is right now and then."""
    asked = prompts(3)
    engine = Engine(target, knowing_head(target), chains_of(3))
    answers = engine.generate(asked, GREEDY)
    assert token_ids(answers) == greedy(NAME, asked)
    assert sum(engine.stats.accepted_at_depth) > 3
    assert engine.stats.num_emitted > engine.stats.num_request_cycles + 3


def test_the_controller_changes_nothing(target: Target) -> None:
    asked = prompts(5)
    engine = Engine(target, tiny_head(target), chains_of(4, max_requests=2))
    engine._cycle.host._planners = ChainPlanners(
        AdaptiveChains(4), AdaptiveChains(4, is_sampled=True)
    )
    for _ in range(3):
        answers = engine.generate(asked, GREEDY)
        assert token_ids(answers) == greedy(NAME, asked)
    chains = engine.stats.controller["chains"]
    assert isinstance(chains, dict)
    assert chains["drafting_cycles"] > 0
    assert chains["plain_cycles"] > 0


def test_kept_prefixes_serve_later_requests(target: Target) -> None:
    """Features that waited are there when another request goes on from the same blocks."""
    asked, said = meet_a_prefix_again(target, GREEDY, GREEDY)
    assert said == greedy(NAME, asked)


def test_requests_of_all_kinds_together(target: Target) -> None:
    """Greedy ones beside sampled ones, ones without drafts, and ones that stop on the way."""
    asked = prompts(4)
    params = [
        GREEDY,
        SamplingParams(max_tokens=40, temperature=0.9, seed=3),
        SamplingParams(max_tokens=9, speculate=False),
        SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(int(greedy(NAME, asked)[3][6]),)),
    ]
    alone = [_answer(Engine(target), p, one) for p, one in zip(asked, params, strict=True)]
    for settings in (chains_of(3), chains_of(2, max_requests=2), chains_of(5, block_size=2)):
        engine = Engine(target, knowing_head(target), settings)
        answers = engine.generate(asked, params)
        assert token_ids(answers) == token_ids(alone)
        assert [one.finish_reason for one in answers] == [one.finish_reason for one in alone]
        engine.check_integrity()


def _answer(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    return engine.generate([prompt], params)[0]


def test_requests_that_leave_and_come_back(target: Target) -> None:
    """Aborted and preempted ones hand over what waited for them; little memory makes them wait."""
    asked = prompts(5)
    engine = Engine(target, tiny_head(target), chains_of(3, block_size=4, max_requests=3))
    sequences = [engine.add(engine.make_request(p, GREEDY)) for p in asked[:3]]
    while len(sequences[0].output_ids) < 6:
        engine.step()
    engine.abort([sequences[1]])
    engine.preempt(sequences[2])
    while not (sequences[0].is_finished and sequences[2].is_finished):
        engine.step()
    expected = greedy(NAME, asked)
    assert [sequences[0].output_ids, sequences[2].output_ids] == [expected[0], expected[2]]
    engine.check_integrity()
    small = Engine(target, tiny_head(target), chains_of(3, block_size=4, cache_tokens=96))
    assert token_ids(small.generate(asked, GREEDY)) == expected


def test_logits_that_are_no_numbers_fail_alone(target: Target) -> None:
    """The ordinary way tells the same: nothing can be chosen."""
    engine = Engine(target, tiny_head(target), chains_of(2))
    seq = engine.add(engine.make_request(prompts(1)[0], GREEDY))
    while len(seq.output_ids) < 4:
        engine.step()
    keys, _ = engine._cache.target_memory.pools[None].layer(1)
    keys.fill_(float("nan"))
    while not seq.has_ended:
        engine.step()
    assert seq.error is not None
    assert "are not numbers" in str(seq.error)
