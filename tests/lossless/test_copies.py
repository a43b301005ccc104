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
from fledge.store.compiler import find_compiler
from fledge.testing import target_of, tiny_head, tiny_model
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import greedy, prompts, token_ids

CHAIN = TreeSettings(depth=4, width=1, budget=4)
LONG = SamplingParams(max_tokens=90, ignore_eos=True)
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
