"""Sampled text has exactly the target's distribution, tested on a vocabulary one can enumerate.

The target has eight tokens, so all joint outcomes of three output tokens can be listed with their
exact probabilities, computed by transformers with its own logit warpers. Thousands of seeds go
through the engine with draft trees that accept about half the time, and a chi-square test compares
the counts. Seeds are fixed, so a test that passes always passes.

The test must be able to fail: the mutants at the end break one thing each and have to be caught.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fledge import Engine, EngineSettings, SamplingParams
from fledge.engine import engine as engine_module
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.drafter import MemorylessDrafter
from fledge.engine.sequence import Sequence as RunningSequence
from fledge.ops import accept, noise, sampling
from fledge.ops.tree import TreeBatch
from fledge.testing import target_of, tiny_model

VOCAB_SIZE = 8
PROMPT = [1, 3, 5]
NUM_TOKENS = 3
NUM_SAMPLES = 2000
"""Enough to catch every mutant."""
MORE_SAMPLES = 8000
ALPHA = 1e-4
MIN_EXPECTED = 5.0

MIXES: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2, top-p": {"temperature": 2.0, "top_p": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "rules": {"temperature": 0.8, "logit_bias": {2: 0.9, 4: -0.6}, "repetition_penalty": 1.6},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.85, "min_p": 0.05},
}
DEFAULT_MIX = "all"

Outcome = tuple[int, ...]


@pytest.fixture(scope="module")
def model() -> Any:
    # Flat enough that every token has a chance, so that filters and drafts have something to do.
    small = tiny_model("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2, seed=3)
    with torch.no_grad():
        small.lm_head.weight.mul_(0.2)
    return small


class FixedTrees(MemorylessDrafter):
    """Always the same drafts: three children below the root, three below each of them.

    Random drafts would spread the errors of a wrong rule evenly over the tokens and hide them.
    """

    num_scratch = 12
    parents = (0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
    drafts = (2, 7, 4, 0, 3, 6, 5, 1, 2, 7, 6, 0)

    def draft(self, sequences: Sequence[RunningSequence], plan: DraftPlan) -> TreeBatch:
        del plan
        return TreeBatch(
            tokens_BN=torch.tensor([(seq.newest_token_id, *self.drafts) for seq in sequences]),
            parents_BN=torch.tensor([self.parents] * len(sequences)),
            sizes_B=torch.full((len(sequences),), len(self.parents)),
            logprobs_BN=torch.zeros(len(sequences), len(self.parents)),
            num_drafts=12 * len(sequences),
        )


def exact(model: Any, mix: dict[str, Any]) -> dict[Outcome, float]:
    """Probability of every joint outcome, by transformers alone."""
    warpers = LogitsProcessorList()
    if "logit_bias" in mix:
        bias = {(token,): value for token, value in mix["logit_bias"].items()}
        warpers.append(SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in mix:
        warpers.append(RepetitionPenaltyLogitsProcessor(mix["repetition_penalty"]))
    warpers.append(TemperatureLogitsWarper(mix["temperature"]))
    if "top_k" in mix:
        warpers.append(TopKLogitsWarper(mix["top_k"]))
    if "top_p" in mix:
        warpers.append(TopPLogitsWarper(mix["top_p"]))
    if "min_p" in mix:
        warpers.append(MinPLogitsWarper(mix["min_p"]))
    known: dict[Outcome, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        prefixes = list(known)
        ids = torch.tensor([PROMPT + list(prefix) for prefix in prefixes])
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        probs = warpers(ids, logits).double().softmax(dim=-1)
        known = {
            (*prefix, token): known[prefix] * float(probs[i, token])
            for (i, prefix), token in itertools.product(enumerate(prefixes), range(VOCAB_SIZE))
        }
    return known


def observe(model: Any, mix: dict[str, Any], rule: str, num_samples: int) -> Counter[Outcome]:
    settings = EngineSettings(accept=rule, max_requests=500, max_pass_tokens=10**6)
    engine = Engine(target_of(model), settings=settings, drafter=FixedTrees())
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **mix)
        for seed in range(num_samples)
    ]
    completions = engine.generate([PROMPT] * num_samples, params)
    return Counter(completion.token_ids for completion in completions)


def p_value(expected: dict[Outcome, float], seen: Counter[Outcome], length: int) -> float:
    """Chi-square over the first `length` tokens; 0 when an impossible outcome occurred."""
    total = sum(seen.values())
    want: Counter[Outcome] = Counter()
    have: Counter[Outcome] = Counter()
    for outcome, probability in expected.items():
        want[outcome[:length]] += probability * total
    for outcome, count in seen.items():
        have[outcome[:length]] += count
    if any(want[outcome] == 0 for outcome in have):
        return 0.0
    big = [outcome for outcome in want if want[outcome] >= MIN_EXPECTED]
    cells = [(want[outcome], have[outcome]) for outcome in big]
    rest = (total - sum(w for w, _ in cells), total - sum(h for _, h in cells))
    if rest[0] >= MIN_EXPECTED:
        cells.append(rest)
    statistic = sum((h - w) ** 2 / w for w, h in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "num_samples", [NUM_SAMPLES, pytest.param(MORE_SAMPLES, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rule", ["gumbel", "rejection"])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_joint_outcomes_have_the_targets_distribution(
    model: Any, mix: str, rule: str, num_samples: int
) -> None:
    expected = exact(model, MIXES[mix])
    seen = observe(model, MIXES[mix], rule, num_samples)
    for length in (1, 2, 3):
        assert p_value(expected, seen, length) > ALPHA


def _is_caught(model: Any, rule: str, mix: str = DEFAULT_MIX) -> bool:
    expected = exact(model, MIXES[mix])
    seen = observe(model, MIXES[mix], rule, NUM_SAMPLES)
    return any(p_value(expected, seen, length) <= ALPHA for length in (1, 2, 3))


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str, Any], None]]:
    return monkeypatch.setattr


def test_catches_noise_reused_between_positions(model: Any, mutate: Any) -> None:
    real = noise.gumbel
    mutate(sampling, "gumbel", lambda s, p, n, stream=0: real(s, torch.zeros_like(p), n, stream))
    assert _is_caught(model, "gumbel")


def test_catches_unprocessed_probabilities_at_the_bonus_token(model: Any, mutate: Any) -> None:
    def bonus_unprocessed(
        logits_RV: Tensor,
        rows_BN: Tensor,
        tree: TreeBatch,
        batch: Any,
        position_B: Tensor,
        rules: None,
        max_depth: int | None,
    ) -> accept.Walk:
        walk = accept.walk_gumbel(logits_RV, rows_BN, tree, batch, position_B)
        last_B1 = walk.lengths_B[:, None] - 1
        rows_B = rows_BN.gather(1, walk.nodes_BL.gather(1, last_B1))[:, 0]
        noise_BV = noise.gumbel(batch.seed_B, position_B + last_B1[:, 0], VOCAB_SIZE)
        raw_B = (logits_RV[rows_B].double() + noise_BV).argmax(dim=-1)
        tokens_BL = walk.tokens_BL.scatter(1, last_B1, raw_B[:, None])
        return dataclasses.replace(walk, tokens_BL=tokens_BL)

    mutate(engine_module, "_RULES", {"gumbel": bonus_unprocessed})
    assert _is_caught(model, "gumbel")


def test_catches_a_biased_hash(model: Any, mutate: Any) -> None:
    real = noise._mix
    mutate(noise, "_mix", lambda bits: real(bits) & ~(1 << 62))
    assert _is_caught(model, "gumbel")


def test_catches_a_sibling_that_is_not_removed(model: Any, mutate: Any) -> None:
    mutate(accept, "_remove", lambda probs, token, rejected: probs)
    assert _is_caught(model, "rejection")


def test_catches_a_residual_that_is_not_renormalised(model: Any, mutate: Any) -> None:
    def zero_only(probs_BV: Tensor, token_B1: Tensor, is_rejected_B: Tensor) -> Tensor:
        return torch.where(is_rejected_B[:, None], probs_BV.scatter(1, token_B1, 0.0), probs_BV)

    mutate(accept, "_remove", zero_only)
    assert _is_caught(model, "rejection")
