"""Penalties depend on what was said before, so every node of a tree has its own.

Catches penalties counted at the root only (deep nodes would be judged as if their ancestors had not
been said), tokens of rejected branches left in the counts, and a neighbour's counts.
"""

from typing import Any

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.support import pair, prompts, scripted, token_ids

MAX_TOKENS = 24
HYBRID = "gemma3-hybrid"
TREE = EngineSettings(tree=TreeSettings(depth=4, width=3, budget=12))


def by_transformers(model: Any, asked: list[list[int]], **options: Any) -> list[list[int]]:
    answers = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            **options,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def engines(target: Target, asked: list[list[int]], answers: list[list[int]]) -> list[Engine]:
    return [
        Engine(target),
        Engine(target, tiny_head(target), TREE),
        Engine(target, drafter=scripted(asked, answers, accuracy=1.0)),
        Engine(target, drafter=scripted(asked, answers, accuracy=0.6, depth=8, width=2)),
    ]


@pytest.mark.parametrize(
    ("architecture", "penalty"),
    [
        *(("llama", 1.3), ("llama", 0.8), ("qwen3", 0.8), (HYBRID, 1.3)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("qwen3", 1.3), (HYBRID, 0.8))),
    ],
)
def test_repetition_penalty_equals_transformers(architecture: str, penalty: float) -> None:
    model, target = pair(architecture)
    asked = prompts(4)
    expected = by_transformers(model, asked, repetition_penalty=penalty)
    plain = by_transformers(model, asked)
    assert expected != plain
    params = SamplingParams(max_tokens=MAX_TOKENS, repetition_penalty=penalty)
    for engine in engines(target, asked, expected):
        assert token_ids(engine.generate(asked, params)) == expected


def test_the_targets_own_penalty_is_obeyed_unless_told_otherwise() -> None:
    """Some targets bring one in generation_config.json, and transformers applies it."""
    model = tiny_model("qwen2")
    asked = prompts(3)
    without = by_transformers(model, asked)
    model.generation_config.repetition_penalty = 1.4
    expected = by_transformers(model, asked)
    assert expected != without
    target = target_of(model)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for engine in engines(target, asked, expected):
        assert token_ids(engine.generate(asked, params)) == expected
    off = SamplingParams(max_tokens=MAX_TOKENS, repetition_penalty=1.0)
    assert token_ids(Engine(target).generate(asked, off)) == without


@pytest.mark.parametrize(
    ("architecture", "temperature"),
    [
        *(("llama", 0.0), ("qwen3", 1.0), (HYBRID, 0.0), (HYBRID, 1.0)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("llama", 1.0), ("qwen3", 0.0))),
    ],
)
def test_drafts_do_not_change_penalised_text(architecture: str, temperature: float) -> None:
    _, target = pair(architecture)
    asked = prompts(6)
    mixes: list[dict[str, float]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {},
        {"repetition_penalty": 1.5},
    ]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=i, **mix)
        for i, mix in enumerate(mixes)
    ]
    alone = [
        token_ids(Engine(target).generate([prompt], one))[0]
        for prompt, one in zip(asked, params, strict=True)
    ]
    for engine in engines(target, asked, alone):
        assert token_ids(engine.generate(asked, params)) == alone


def test_a_strong_presence_penalty_never_says_a_token_twice() -> None:
    _, target = pair("llama")
    params = SamplingParams(max_tokens=40, presence_penalty=1e6, ignore_eos=True)
    for completion in Engine(target, tiny_head(target), TREE).generate(prompts(3), params):
        assert len(set(completion.token_ids)) == 40
