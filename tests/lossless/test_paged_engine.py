"""Memory and scheduling decide when a token comes, never which: everything at once, on purpose.

Prompts share beginnings, are read in small chunks, wait for rows and memory, are preempted at
random cycles, join and leave; drafts are right, wrong, absent or from a head; greedy and sampled
requests share passes. Answers must equal transformers' (greedy) or the request's own alone.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.testing import tiny_head
from tests.lossless.support import greedy, pair, scripted, token_ids

ARCHITECTURES = ["llama", "mistral-sliding", "gemma3-hybrid", "olmo3-hybrid", "deepseek-v3-moe"]
MAX_TOKENS = 16
TREE = TreeSettings(depth=4, width=3, budget=10)


def branching_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that begin alike for a while: whole blocks, parts of blocks, or nothing shared."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 97) for _ in range(length)] for length in (40, 19, 7)]
    asked = []
    for _ in range(count):
        stem = rng.choice(stems)[: rng.randrange(1, 41)]
        asked.append(stem + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 12))])
    return asked


def run_disturbed(
    engine: Engine,
    asked: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    seed: int,
    preempt_chance: float = 0.15,
) -> list[list[int]]:
    """Add requests in bursts while others run, and take memory away at random cycles."""
    rng = random.Random(seed)
    left = list(zip(asked, params, strict=True))
    sequences: list[Any] = []
    while left or engine.has_work:
        for _ in range(rng.randrange(4)):
            if left:
                prompt, one = left.pop(0)
                sequences.append(engine.add(engine.make_request(prompt, one)))
        if engine.has_work:
            engine.step()
            engine.check_integrity()
        running = [seq for seq in sequences if seq.row >= 0]
        for seq in running:
            if rng.random() < preempt_chance:
                engine.preempt(seq)
                engine.check_integrity()
    assert all(seq.is_finished for seq in sequences)
    return [list(seq.output_ids) for seq in sequences]


SETTINGS = {
    "roomy": EngineSettings(tree=TREE, max_requests=8),
    "chunked": EngineSettings(tree=TREE, max_requests=4, max_pass_tokens=24, block_size=4),
    "starved": EngineSettings(
        tree=TREE, max_requests=6, max_pass_tokens=40, block_size=4, cache_tokens=160
    ),
    "alone": EngineSettings(tree=TREE, share_prefixes=False, block_size=3, max_requests=3),
}


KINDS = ["plain", "scripted", "head"]
# Every pair of architecture, setting and kind occurs; all three together only here and there.
CASES = [
    (architecture, setting, KINDS[(i + j) % 3])
    for i, architecture in enumerate(ARCHITECTURES)
    for j, setting in enumerate(sorted(SETTINGS))
]


@pytest.mark.parametrize("count", [9, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("architecture", "setting", "kind"), CASES)
def test_greedy_answers_survive_everything(
    architecture: str, setting: str, kind: str, count: int
) -> None:
    _, target = pair(architecture)
    asked = branching_prompts(count)
    expected = greedy(architecture, asked, max_tokens=MAX_TOKENS)
    drafts: dict[str, Any] = {}
    if kind == "scripted":
        drafts["drafter"] = scripted(asked, expected, depth=4, width=3, budget=10)
    if kind == "head":
        window = 6 if architecture == "gemma3-hybrid" else None
        drafts["head"] = tiny_head(target, sliding_window=window)
    engine = Engine(target, settings=SETTINGS[setting], **drafts)
    params = [SamplingParams(max_tokens=MAX_TOKENS)] * len(asked)
    assert run_disturbed(engine, asked, params, seed=1) == expected
    # Again, now that the cache is full of what the first round left behind.
    assert run_disturbed(engine, asked, params, seed=2, preempt_chance=0.0) == expected
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert (stats.num_reused_tokens > 0) == SETTINGS[setting].share_prefixes


@pytest.mark.parametrize(
    "architecture", [pytest.param("llama", marks=pytest.mark.slow), "gemma3-hybrid"]
)
def test_a_request_is_the_same_alone_and_among_31_others(architecture: str) -> None:
    _, target = pair(architecture)
    asked = branching_prompts(32, seed=3)
    mixes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 8, "repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    ]
    params = [
        SamplingParams(max_tokens=4 + i % 13, seed=i, **mixes[i % len(mixes)]) for i in range(32)
    ]
    alone = [
        token_ids(Engine(target).generate([prompt], one))[0]
        for prompt, one in zip(asked, params, strict=True)
    ]
    settings = EngineSettings(tree=TREE, max_requests=32, max_pass_tokens=64, block_size=8)
    for drafts in ({}, {"head": tiny_head(target)}, {"drafter": scripted(asked, alone, width=3)}):
        engine = Engine(target, settings=settings, **drafts)
        assert token_ids(engine.generate(asked, params)) == alone
        assert run_disturbed(engine, asked, params, seed=5) == alone


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3-hybrid"])
def test_long_conversations_reuse_what_was_said(architecture: str) -> None:
    """Each turn repeats the whole conversation so far, far beyond every window."""
    _, target = pair(architecture)
    engine = Engine(target, tiny_head(target), EngineSettings(tree=TREE, block_size=8))
    history: list[int] = [5, 9, 11]
    for turn in range(5):
        expected = greedy(architecture, [history], max_tokens=22)[0]
        completion = engine.generate([history], SamplingParams(max_tokens=22))[0]
        assert list(completion.token_ids) == expected
        if turn:
            # All but the last answer's final token, which was never read, and the new question.
            assert completion.stats.num_prompt_reused >= len(history) - 5
        history = [*history, *expected, 20 + turn, 21 + turn, 22 + turn]
