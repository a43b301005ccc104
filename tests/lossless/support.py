"""The oracle of this folder: transformers' own generate, one prompt at a time."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fledge.contracts.outputs import Completion
from fledge.models.target import Target
from fledge.testing import ScriptedDrafter, target_of, tiny_model

MAX_TOKENS = 24
# Unequal, and most of them longer than the tiny targets' windows of 8.
PROMPT_LENS = (5, 23, 1, 12, 37, 9, 2, 16)


@cache
def pair(architecture: str, seed: int = 0) -> tuple[Any, Target]:
    """A transformers model and our target over the same weights."""
    model = tiny_model(architecture, seed=seed)
    return model, target_of(model)


def prompts(count: int = len(PROMPT_LENS), seed: int = 0, vocab_size: int = 97) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(n)] for n in PROMPT_LENS[:count]]


@cache
def _greedy(architecture: str, seed: int, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    model, _ = pair(architecture, seed)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
    )
    return output[0, len(prompt) :].tolist()


def greedy(
    architecture: str, asked: Sequence[Sequence[int]], seed: int = 0, max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    """What transformers answers to each prompt."""
    return [_greedy(architecture, seed, tuple(prompt), max_tokens) for prompt in asked]


def scripted(
    asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], **options: Any
) -> ScriptedDrafter:
    known = {tuple(p): a for p, a in zip(asked, answers, strict=True)}
    return ScriptedDrafter(known, **{"vocab_size": 97, "accuracy": 0.7, **options})


def token_ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]
