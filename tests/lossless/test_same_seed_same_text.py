"""Above temperature 0 a request's text depends on its seed, and on nothing the drafts do.

The noise is a function of (seed, output position, token), so with the same seed the text is the
same without a head, with any head, any tree and any company in the batch.
"""

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.testing import tiny_head
from tests.lossless.support import pair, prompts, scripted, token_ids

SLOW = pytest.mark.slow
ARCHITECTURES = ["llama", "gemma3-hybrid", "qwen3-moe"]
MIXES = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


# Every architecture with all filters and with none; filters one by one on the plainest.
CASES = [
    pytest.param(one, mix, marks=[] if one == "llama" or mix in ("all", "hot") else SLOW)
    for one in ARCHITECTURES
    for mix in sorted(MIXES)
]


def _params(mix: str, count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, seed=100 + i, **MIXES[mix]) for i in range(count)]


@pytest.mark.parametrize(("architecture", "mix"), CASES)
def test_drafts_do_not_change_the_text(architecture: str, mix: str) -> None:
    _, target = pair(architecture)
    asked = prompts(4)
    params = _params(mix, 4)
    plain = token_ids(Engine(target).generate(asked, params))
    assert len({tuple(answer) for answer in plain}) == len(plain)
    for accuracy, shape in ((1.0, (4, 3, 16)), (0.6, (8, 1, 8)), (0.6, (3, 10, 60))):
        depth, width, budget = shape
        drafter = scripted(asked, plain, accuracy=accuracy, depth=depth, width=width, budget=budget)
        completions = Engine(target, drafter=drafter).generate(asked, params)
        assert token_ids(completions) == plain
        assert any(c.stats.cycles < c.stats.num_tokens - 1 for c in completions)
    for depth, width, budget in ((1, 10, 10), (5, 1, 5), (4, 4, 30)):
        settings = EngineSettings(tree=TreeSettings(depth=depth, width=width, budget=budget))
        engine = Engine(target, tiny_head(target, draft_vocab_size=97), settings)
        assert token_ids(engine.generate(asked, params)) == plain


def test_company_does_not_change_the_text() -> None:
    """Greedy and sampled requests side by side, each as if it were alone."""
    _, target = pair("olmo3-hybrid")
    asked = prompts(8)
    params = [
        SamplingParams(max_tokens=12, seed=i, **(MIXES[mix] if mix else {}))
        for i, mix in enumerate(["all", "", "hot", "top-k", "", "top-p", "min-p", "temperature"])
    ]
    alone = [
        token_ids(Engine(target).generate([prompt], one))[0]
        for prompt, one in zip(asked, params, strict=True)
    ]
    assert token_ids(Engine(target).generate(asked, params)) == alone
    assert token_ids(Engine(target, tiny_head(target)).generate(asked, params)) == alone
    few_at_once = EngineSettings(max_requests=2)
    assert token_ids(Engine(target, settings=few_at_once).generate(asked, params)) == alone


def test_seeds_matter_and_repeat() -> None:
    _, target = pair("llama")
    prompt = prompts(1)[0]
    engine = Engine(target, tiny_head(target))
    params = [SamplingParams(max_tokens=16, temperature=1.0, seed=s) for s in range(20)]
    first = token_ids(engine.generate([prompt] * 20, params))
    assert token_ids(engine.generate([prompt] * 20, params)) == first
    assert len({tuple(answer) for answer in first}) > 15


def test_top_k_of_one_is_greedy() -> None:
    _, target = pair("qwen2")
    asked = prompts(4)
    greedy = token_ids(Engine(target).generate(asked, SamplingParams(max_tokens=16)))
    narrow = SamplingParams(max_tokens=16, temperature=1.3, top_k=1, seed=9)
    for rule in ("gumbel", "rejection"):
        engine = Engine(target, tiny_head(target), EngineSettings(accept=rule))
        assert token_ids(engine.generate(asked, narrow)) == greedy


def test_rejection_rule_is_greedy_at_temperature_zero() -> None:
    _, target = pair("gemma2-hybrid")
    asked = prompts(4)
    greedy = token_ids(Engine(target).generate(asked, SamplingParams(max_tokens=16)))
    drafter = scripted(asked, greedy)
    engine = Engine(target, settings=EngineSettings(accept="rejection"), drafter=drafter)
    mixed = [SamplingParams(max_tokens=16)] * 2 + [
        SamplingParams(max_tokens=16, temperature=1.0, seed=i) for i in range(2)
    ]
    assert token_ids(engine.generate(asked, mixed))[:2] == greedy[:2]
