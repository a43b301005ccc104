"""Cycles of requests above temperature 0 on a CPU's native kernels: the same text as the ordinary
way says, with and without drafts, in any company."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge import Engine, SamplingParams
from fledge.engine.chain_planner import AdaptiveChains, ChainPlanners
from fledge.models.native_check import find_native
from fledge.models.target import Target
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.native_chains import TokenChain
from fledge.ops.native_walk import Draw, NativeWalk
from fledge.store.compiler import find_compiler
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.native_cycles import chains_of, knowing_head, meet_a_prefix_again
from tests.lossless.support import MAX_TOKENS, prompts, token_ids

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
KINDS = [
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9, seed=2**63 - 1),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, top_k=12, min_p=0.02, seed=3),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.4, top_k=30, top_p=0.8, seed=0),
]
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    with choose_kernels("native"):
        yield


@pytest.fixture(autouse=True)
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each native walk was about, but for those that prove the kernels."""
    with choose_kernels("native"):
        find_native(torch.zeros(1), 0)
    found: list[int] = []
    run = NativeWalk.run

    def count(
        self: NativeWalk, logits: Tensor, chains: Sequence[TokenChain], draws: Sequence[Draw]
    ) -> list[int | None]:
        found.append(len(draws))
        return run(self, logits, chains, draws)

    monkeypatch.setattr(NativeWalk, "run", count)
    return found


@pytest.fixture(scope="module")
def target() -> Target:
    with choose_kernels("native"):
        return target_of(tiny_model("llama-tied"))


def _ordinary(
    target: Target, asked: list[list[int]], params: list[SamplingParams]
) -> list[list[int]]:
    """What the ordinary way says to each alone, without drafts, on the same logits."""
    engine = Engine(target, settings=chains_of(1))
    engine._cycle.host._is_on = False
    found = zip(asked, params, strict=True)
    return [token_ids(engine.generate([ids], one))[0] for ids, one in found]


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen3", "gemma3-hybrid"])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_chains_change_nothing(architecture: str, depth: int, walks: list[int]) -> None:
    other = target_of(tiny_model(architecture))
    asked = prompts(4)
    wanted = _ordinary(other, asked, KINDS)
    assert not walks
    engine = Engine(other, tiny_head(other) if depth else None, chains_of(depth or 1))
    assert token_ids(engine.generate(asked, KINDS)) == wanted
    assert walks
    assert token_ids(engine.generate(asked[2:], KINDS[2:])) == wanted[2:]
    assert token_ids(engine.generate(asked[:1], KINDS[:1])) == wanted[:1]


@pytest.mark.parametrize("seed", range(4))
def test_drafts_under_the_same_noise_are_accepted(target: Target, seed: int) -> None:
    """A head that reads the target's own logits is right now and then, at any temperature."""
    asked = prompts(4)
    params = [replace(one, seed=one.seed ^ seed) for one in KINDS]
    engine = Engine(target, knowing_head(target), chains_of(3))
    assert token_ids(engine.generate(asked, params)) == _ordinary(target, asked, params)
    assert sum(engine.stats.accepted_at_depth) > 3


def test_greedy_requests_beside_sampled_ones(target: Target, walks: list[int]) -> None:
    """Also ones without drafts, ones that stop early, and ones that go the ordinary way."""
    asked = prompts(6)
    params = [
        GREEDY,
        *KINDS[:2],
        replace(KINDS[2], speculate=False, max_tokens=9),
        replace(KINDS[3], max_tokens=2),
        GREEDY,
    ]
    wanted = _ordinary(target, asked, params)
    for settings in (chains_of(3), chains_of(2, max_requests=3), chains_of(5, block_size=2)):
        walks.clear()
        engine = Engine(target, knowing_head(target), settings)
        assert token_ids(engine.generate(asked, params)) == wanted
        assert max(walks) > 1
        engine.check_integrity()


def test_what_needs_more_goes_the_ordinary_way(target: Target, walks: list[int]) -> None:
    asked = prompts(1)
    further: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
    ]
    for more in further:
        params = replace(KINDS[0], **more)
        engine = Engine(target, tiny_head(target), chains_of(2))
        assert token_ids(engine.generate(asked, params)) == _ordinary(target, asked, [params])
    engine = Engine(target, tiny_head(target), chains_of(2, accept="rejection"))
    engine.generate(asked, KINDS[0])
    assert not walks


def test_the_controller_changes_nothing(target: Target) -> None:
    asked = prompts(4)
    engine = Engine(target, tiny_head(target), chains_of(4, max_requests=2))
    sampled = AdaptiveChains(4, is_sampled=True)
    engine._cycle.host._planners = ChainPlanners(AdaptiveChains(4), sampled)
    wanted = _ordinary(target, asked, KINDS)
    for _ in range(3):
        assert token_ids(engine.generate(asked, KINDS)) == wanted
        engine.generate(asked[:1], GREEDY)
    chains = engine.stats.controller["sampled_chains"]
    assert isinstance(chains, dict)
    assert chains["drafting_cycles"] > 0
    assert chains["plain_cycles"] > 0


def test_kept_prefixes_serve_later_requests(target: Target) -> None:
    """What waited is there when another request goes on from the same blocks."""
    asked, said = meet_a_prefix_again(target, *KINDS[:2])
    assert said == _ordinary(target, asked, KINDS[:2])


def test_requests_that_leave_and_come_back(target: Target) -> None:
    """Little memory, an abort and a preemption: positions of the noise go on where they were."""
    asked = prompts(4)
    engine = Engine(target, knowing_head(target), chains_of(3, block_size=4, max_requests=3))
    made = zip(asked[:3], KINDS[:3], strict=True)
    sequences = [engine.add(engine.make_request(ids, one)) for ids, one in made]
    while len(sequences[0].output_ids) < 6:
        engine.step()
    engine.abort([sequences[1]])
    engine.preempt(sequences[2])
    while not (sequences[0].is_finished and sequences[2].is_finished):
        engine.step()
    wanted = _ordinary(target, asked, KINDS)
    assert [sequences[0].output_ids, sequences[2].output_ids] == [wanted[0], wanted[2]]
    engine.check_integrity()
    small = Engine(target, tiny_head(target), chains_of(3, block_size=4, cache_tokens=96))
    assert token_ids(small.generate(asked, KINDS)) == wanted


def test_logits_that_are_no_numbers_fail_alone(target: Target) -> None:
    engine = Engine(target, tiny_head(target), chains_of(2))
    seq = engine.add(engine.make_request(prompts(1)[0], KINDS[0]))
    while len(seq.output_ids) < 4:
        engine.step()
    keys, _ = engine._cache.target_memory.pools[None].layer(1)
    keys.fill_(float("nan"))
    while not seq.has_ended:
        engine.step()
    assert seq.error is not None
    assert "are not numbers" in str(seq.error)
