"""Drafts that are copied from the text before: the same text as without, and as plain decoding.

Catches: a copy taken for the head's own, entries of drafts that the head has not read and that it
looks at later, a text remembered wrongly after drafts were refused, blocks shared or memory taken.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.synthetic_walk import SyntheticWalk
from fledge.store.compiler import find_compiler
from fledge.testing import target_of, tiny_head, tiny_model
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import greedy, prompts, token_ids

CHAIN = TreeSettings(depth=4, width=1, budget=4)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
ROUND = [*CIRCLE, *CIRCLE[:7]]


def _settings(**changes: Any) -> EngineSettings:
    return replace(EngineSettings(controller="fixed", tree=CHAIN), **changes)


def repetitive(count: int) -> list[list[int]]:
    """Prompts that say the same again and again."""
    return [(prompt * 9)[:41] for prompt in prompts(count)]


@pytest.fixture(params=["native", "plain"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Cycles of lists on the host, and the ordinary ones."""
    if request.param == "native" and find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    with choose_kernels(request.param):
        yield request.param


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3-hybrid", "qwen3"])
def test_repetitive_prompts(architecture: str, way: str) -> None:
    target = target_of(tiny_model(architecture))
    asked = repetitive(5)
    engine = Engine(target, tiny_head(target), _settings(max_requests=3, block_size=4))
    answers = engine.generate(asked, SamplingParams(max_tokens=48))
    assert token_ids(answers) == greedy(architecture, asked, max_tokens=48)
    assert engine.stats.num_copies_offered, way
    engine.check_integrity()


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_copies_help_a_head_that_knows_nothing(
    forced: tuple[Target, Eagle3Head], way: str, graphs: str
) -> None:
    target, _ = forced
    if (way, graphs) == ("native", "on"):
        pytest.skip("lists on the host do not run ahead of it")
    asked = [ROUND, ROUND[3:], CIRCLE[:2]]
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, LONG)
    engines = {
        copies: Engine(target, tiny_head(target), _settings(copies=copies, graphs=graphs))
        for copies in (True, False)
    }
    answers = {copies: engine.generate(asked, LONG) for copies, engine in engines.items()}
    assert token_ids(answers[True]) == token_ids(answers[False]) == token_ids(plain), way
    stats = engines[True].stats
    assert stats.num_copies_accepted > 40
    assert stats.num_copies_accepted == stats.num_copies_offered, "the text goes in circles"
    assert stats.accept_length > 2
    assert engines[False].stats.num_copies_offered == 0
    assert engines[False].stats.accept_length < 1.5


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_requests_of_all_kinds_and_little_memory(
    forced: tuple[Target, Eagle3Head], graphs: str
) -> None:
    """Sampled ones whose copies are refused now and then; some lose their memory, some find it."""
    target, _ = forced
    asked = [[*ROUND[start:], *ROUND[:start]] for start in (0, 5, 11, 2)]
    kinds = ({}, {"temperature": 2.5}, {"temperature": 4.0, "top_k": 3}, {"speculate": False})
    params = [SamplingParams(max_tokens=36, ignore_eos=True, seed=3, **kind) for kind in kinds]
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    changes: dict[str, Any] = {"graphs": graphs, "block_size": 4, "cache_tokens": 264}
    engine = Engine(target, tiny_head(target), _settings(**changes))
    for prompts_of_round in (asked, [one + one[:20] for one in asked]):
        answers = engine.generate(prompts_of_round, params)
        assert token_ids(answers) == token_ids(plain.generate(prompts_of_round, params))
    stats = engine.stats
    assert stats.num_preemptions
    assert stats.num_reused_tokens
    assert 20 < stats.num_copies_accepted < stats.num_copies_offered
    engine.check_integrity()


def test_the_device_copies_what_the_host_copies(forced: tuple[Target, Eagle3Head]) -> None:
    target, _ = forced
    asked = [ROUND, ROUND[4:], [*ROUND, 5, *ROUND[2:9]]]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, top_k=1)
        for temperature in (0.0, 1.0, 1.0)
    ]
    found = []
    for graphs in ("off", "on"):
        for tree in (CHAIN, TreeSettings(depth=3, width=2, budget=6)):
            engine = Engine(target, tiny_head(target), _settings(graphs=graphs, tree=tree))
            answers = engine.generate(asked, params)
            copies = [
                (one.stats.num_copies_offered, one.stats.num_copies_accepted) for one in answers
            ]
            found.append((token_ids(answers), copies))
    (host, host_tree, device, device_tree) = found
    assert host == device
    assert host_tree == device_tree
    assert host[0] == host_tree[0]
    assert host[1][0] > (20, 20), host[1]
    assert sum(offered for offered, _ in host[1][1:]) > 10, host[1]
    assert host_tree[1] == [(0, 0)] * 3, "trees with branches are the head's own"


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_head_that_looks_back_a_little(graphs: str) -> None:
    """What its window has left behind is gone on the device, and nobody copies from there."""
    target = target_of(tiny_model("llama-tied"))
    asked = repetitive(5)
    head = tiny_head(target, sliding_window=16)
    engine = Engine(target, head, _settings(graphs=graphs, block_size=4, max_requests=2))
    answers = engine.generate(asked, SamplingParams(max_tokens=48))
    assert token_ids(answers) == greedy("llama-tied", asked, max_tokens=48)
    assert engine.stats.num_copies_offered
    engine.check_integrity()


def test_drafts_that_are_right_by_chance_are_never_copies(
    forced: tuple[Target, Eagle3Head],
) -> None:
    target, head = forced
    walk = SyntheticWalk((0.7,) * 4)
    engine = Engine(target, head, _settings(graphs="on"), measured_with=walk)
    engine.generate([ROUND, ROUND], LONG)
    assert engine.stats.num_copies_offered == 0
    assert not engine.settings.copies
