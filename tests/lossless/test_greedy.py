"""Greedy decoding in float32 on the CPU says, token for token, what transformers' generate says.

Over architectures (full, sliding with a window shorter than the prompt, hybrid, mixture of experts,
latent attention, tied and untied embeddings), tree shapes, batches of unequal prompts, and drafts
that are always right, never right and sometimes right.
"""

import math

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.testing import ARCHITECTURES, tiny_head
from tests.lossless.support import MAX_TOKENS, greedy, pair, prompts, scripted, token_ids

GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
ARCHITECTURE_NAMES = sorted(ARCHITECTURES)
DEPTH = 4
SLOW = pytest.mark.slow
SHAPED = ["llama", "gemma3-hybrid"]


def shaped_trees() -> list[object]:
    """All shapes for one architecture, those at the edges and between them for the other."""
    shapes = [(depth, 1, depth) for depth in range(1, 9)]
    shapes += [(3, width, 20) for width in range(2, 11)]
    shapes += [(6, 8, budget) for budget in (1, 2, 3, 5, 8, 13, 21, 34, 60)]
    shapes += [(1, 10, 60), (8, 10, 60), (8, 2, 4)]
    few = {(1, 1, 1), (8, 1, 8), (3, 10, 20), (6, 8, 1), (6, 8, 13), *shapes[-3:]}
    return [
        pytest.param(one, *shape, marks=[] if one == SHAPED[0] or shape in few else SLOW)
        for one in SHAPED
        for shape in shapes
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_plain_decoding_equals_transformers(architecture: str) -> None:
    _, target = pair(architecture)
    asked = prompts()
    assert token_ids(Engine(target).generate(asked, GREEDY)) == greedy(architecture, asked)


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_scripted_drafts_change_nothing(architecture: str, accuracy: float) -> None:
    _, target = pair(architecture)
    asked = prompts()
    expected = greedy(architecture, asked)
    drafter = scripted(asked, expected, accuracy=accuracy, depth=DEPTH)
    completions = Engine(target, drafter=drafter).generate(asked, GREEDY)
    assert token_ids(completions) == expected
    cycles = [completion.stats.cycles for completion in completions]
    slowest = [len(answer) - 1 for answer in expected]
    fastest = [math.ceil(num_tokens / (DEPTH + 1)) for num_tokens in slowest]
    if accuracy == 0.0:
        assert cycles == slowest
    elif accuracy == 1.0:
        assert cycles == fastest
    else:
        assert sum(fastest) < sum(cycles) < sum(slowest)


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_head_changes_nothing(architecture: str) -> None:
    _, target = pair(architecture)
    asked = prompts()
    settings = EngineSettings(tree=TreeSettings(depth=4, width=3, budget=12))
    completions = Engine(target, tiny_head(target), settings).generate(asked, GREEDY)
    assert token_ids(completions) == greedy(architecture, asked)


@pytest.mark.parametrize(("architecture", "depth", "width", "budget"), shaped_trees())
def test_every_tree_shape_of_a_head(architecture: str, depth: int, width: int, budget: int) -> None:
    _, target = pair(architecture)
    asked = prompts(3)
    settings = EngineSettings(tree=TreeSettings(depth=depth, width=width, budget=budget))
    completions = Engine(target, tiny_head(target), settings).generate(asked, GREEDY)
    assert token_ids(completions) == greedy(architecture, asked)


@pytest.mark.parametrize("architecture", SHAPED)
@pytest.mark.parametrize(
    ("depth", "width", "budget"),
    [(1, 1, 1), (8, 1, 8), (8, 1, 3), (3, 10, 60), (8, 4, 60), (5, 2, 1), (2, 7, 9), (60, 1, 60)],
)
@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_every_tree_shape_of_scripted_drafts(
    architecture: str, depth: int, width: int, budget: int, accuracy: float
) -> None:
    _, target = pair(architecture)
    asked = prompts(4)
    expected = greedy(architecture, asked)
    shape = {"depth": depth, "width": width, "budget": budget}
    drafter = scripted(asked, expected, accuracy=accuracy, **shape)
    assert token_ids(Engine(target, drafter=drafter).generate(asked, GREEDY)) == expected


@pytest.mark.parametrize(
    "count", [1, 2, 3, 5, 8, *(pytest.param(count, marks=SLOW) for count in (4, 6, 7))]
)
def test_every_batch_size(count: int) -> None:
    _, target = pair("olmo3-hybrid")
    asked = prompts(count)
    expected = greedy("olmo3-hybrid", asked)
    assert token_ids(Engine(target).generate(asked, GREEDY)) == expected
    drafter = scripted(asked, expected)
    assert token_ids(Engine(target, drafter=drafter).generate(asked, GREEDY)) == expected
    assert token_ids(Engine(target, tiny_head(target)).generate(asked, GREEDY)) == expected


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
def test_other_weights(seed: int) -> None:
    for architecture in ("llama-tied", "mistral-sliding", "qwen3-moe"):
        _, target = pair(architecture, seed)
        asked = prompts(4, seed=seed)
        expected = greedy(architecture, asked, seed)
        drafter = scripted(asked, expected, seed=seed)
        assert token_ids(Engine(target, drafter=drafter).generate(asked, GREEDY)) == expected
        head = tiny_head(target, seed=seed)
        assert token_ids(Engine(target, head).generate(asked, GREEDY)) == expected


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_more_requests_than_run_at_once(block_size: int) -> None:
    """Requests join as others leave; blocks are reused by sequences that did not own them."""
    _, target = pair("gemma3-hybrid")
    asked = prompts() + prompts(seed=1)
    expected = greedy("gemma3-hybrid", asked)
    limits = [3 + i % 11 for i in range(len(asked))]
    params = [SamplingParams(max_tokens=limit) for limit in limits]
    settings = EngineSettings(max_requests=3, max_pass_tokens=20, block_size=block_size)
    engine = Engine(target, settings=settings, drafter=scripted(asked, expected))
    for _ in range(2):
        got = token_ids(engine.generate(asked, params))
        assert got == [answer[:n] for answer, n in zip(expected, limits, strict=True)]


def test_long_answers_cross_every_window_and_block_border() -> None:
    for architecture in ("mistral-sliding", "gpt-oss-hybrid-moe"):
        _, target = pair(architecture)
        asked = prompts(2)
        expected = greedy(architecture, asked, max_tokens=150)
        drafter = scripted(asked, expected, depth=6, width=2, budget=12)
        params = SamplingParams(max_tokens=150)
        assert token_ids(Engine(target, drafter=drafter).generate(asked, params)) == expected


@pytest.mark.parametrize(
    "flags",
    [
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"sliding_window": 6},
        {"taps": (0, 1, 2, 3, 4), "num_taps": 5},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"num_heads": 8, "num_kv_heads": 4},
        {"num_heads": 2, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_head_variants_change_nothing(flags: dict[str, object]) -> None:
    _, target = pair("llama")
    asked = prompts(3)
    head = tiny_head(target, **flags)
    assert token_ids(Engine(target, head).generate(asked, GREEDY)) == greedy("llama", asked)
