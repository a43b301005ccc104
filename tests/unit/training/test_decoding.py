"""Decoding held-out prompts: prompts of samples, counts that add up, weights copied each time."""

from types import SimpleNamespace

import pytest
import torch

from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.engine import Engine
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model
from fledge.training.decoding import (
    DecodeSums,
    HeldOutDecoder,
    choose_prompts,
    sum_completions,
    unpacked_decode,
)

PROMPTS = [(5, 9, 13), (7, 7, 30, 41), (60, 3)]


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


def sample(tokens: list[int], mask: list[int]) -> SimpleNamespace:
    return SimpleNamespace(token_ids=tokens, loss_mask=mask)


def test_prompts_end_where_the_target_begins() -> None:
    samples = [
        sample([1, 2, 3, 4], [0, 0, 1, 1]),
        sample([1, 2, 9, 9], [0, 0, 1, 0]),  # the same prompt
        sample([5, 6, 7, 8], [0, 1, 0, 1]),
        sample([5, 6], [1, 1]),  # begins with the target's words
        sample([5, 6], [0, 0]),  # nothing was said
        sample([1, 2, 3, 4, 5], [0, 0, 0, 0, 1]),  # too long
    ]
    found = choose_prompts(samples, count=9, max_prompt_len=3, seed=0)
    assert sorted(found) == [(1, 2), (5,)]
    assert choose_prompts(samples, count=1, max_prompt_len=3, seed=0) == found[:1]
    many = [sample([n, n, 1], [0, 0, 1]) for n in range(50)]
    drawn = [choose_prompts(many, count=5, max_prompt_len=3, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_counts_are_those_of_a_fresh_engine_whatever_was_measured_before(target: Target) -> None:
    first, second = tiny_head(target, seed=0), tiny_head(target, seed=1)
    decoder = HeldOutDecoder(
        target, first.config, first.draft_to_target_V, PROMPTS, depth=3, max_tokens=20
    )
    second.draft_to_target_V = first.draft_to_target_V
    tree = TreeSettings(depth=3, width=1, budget=3)
    settings = EngineSettings(tree=tree, controller="fixed", copies=False)
    for head in (first, second, first):
        fresh = Engine(target, head, settings)
        answers = fresh.generate(PROMPTS, SamplingParams(max_tokens=20))
        # In training the weights are float32 or wider, and in training mode.
        weights = {name: value.double() for name, value in head.train().state_dict().items()}
        sums = decoder.measure(weights)
        assert sums == sum_completions(answers, 3)
        stats = fresh.stats
        assert sums.accept_length == stats.accept_length
        reached = len(stats.offered_at_depth)
        assert sums.offered_at_depth[:reached] == stats.offered_at_depth
        assert sums.accepted_at_depth[:reached] == stats.accepted_at_depth
        assert sums.offered_at_depth[reached:] == (0,) * (3 - reached)
        assert head.training, "the head in training is not touched"


def test_counts_add_up() -> None:
    sums = DecodeSums(
        num_emitted=7, num_cycles=4, offered_at_depth=(4, 2), accepted_at_depth=(2, 1)
    )
    both = unpacked_decode(sums.packed() + sums.packed())
    assert both == DecodeSums(
        num_emitted=14, num_cycles=8, offered_at_depth=(8, 4), accepted_at_depth=(4, 2)
    )
    assert both.accept_length == pytest.approx(1.75)
    assert both.as_record() == {
        "accept_length": 1.75,
        "acceptance_at_depth": [0.5, 0.5],
        "num_cycles": 8,
    }


def test_no_prompts_give_no_figure(target: Target) -> None:
    head = tiny_head(target)
    decoder = HeldOutDecoder(target, head.config, head.draft_to_target_V, [], depth=2, max_tokens=8)
    sums = decoder.measure(head.state_dict())
    assert sums.accept_length is None
    assert sums.as_record()["acceptance_at_depth"] == [None, None]


def test_more_prompts_than_are_answered_at_once_and_other_dtypes(target: Target) -> None:
    head = tiny_head(target)
    prompts = [(3 + n, 9, 11) for n in range(20)]
    decoder = HeldOutDecoder(
        target_of(tiny_model("llama", dtype=torch.bfloat16)),
        head.config,
        head.draft_to_target_V,
        prompts,
        depth=2,
        max_tokens=4,
    )
    sums = decoder.measure(head.state_dict())
    assert sums.num_cycles >= len(prompts) / 2
