"""Taps and logits of a packed pass over our cache equal transformers' own forward.

Catches: taps off by one layer (acceptance drops to chance and nothing else shows it), the last
layer tapped after the final norm, sequences of a pass that see each other, a tree node that sees
its sibling, a window that counts tree nodes instead of positions, and hooks that stay behind.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.models.target import Target
from fledge.ops.kv import KVPool
from fledge.ops.packed import PackedPass, SequencePart, pack
from fledge.testing import ARCHITECTURES, target_of, tiny_model
from tests.parity.reference_head import true_features

NUM_LAYERS = 4
ALL_TAPS = tuple(range(NUM_LAYERS + 1))
PROMPT_LENS = (21, 1, 6)
# A root, a wide level, and one deep branch.
PARENTS = (0, 0, 0, 0, 1, 4, 5, 2, 7, 8)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@cache
def pair(architecture: str) -> tuple[Any, Target]:
    model = tiny_model(architecture)
    return model, target_of(model)


class Sequences:
    """A few prompts with scattered slots in one pool, and a tree below each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random_ids(count: int) -> list[int]:
            return torch.randint(3, 97, (count,), generator=generator).tolist()

        self.prompts = [random_ids(length) for length in PROMPT_LENS]
        self.drafts = [random_ids(len(PARENTS)) for _ in PROMPT_LENS]
        sizes = [length + len(PARENTS) for length in PROMPT_LENS]
        self.slots = list(torch.randperm(sum(sizes), generator=generator).split(sizes))
        self.pool = KVPool(sum(sizes))

    def prefill(self) -> PackedPass:
        parts = []
        for prompt, slots in zip(self.prompts, self.slots, strict=True):
            positions = torch.arange(len(prompt))
            parts.append(
                SequencePart(torch.tensor(prompt), positions, slots[: len(prompt)], positions)
            )
        return pack(parts)

    def verify(self) -> PackedPass:
        parts = []
        for prompt, drafts, slots in zip(self.prompts, self.drafts, self.slots, strict=True):
            context = torch.arange(len(prompt))
            visible_QK = torch.ones(len(PARENTS), len(slots), dtype=torch.bool)
            visible_QK[:, len(prompt) :] = False
            for node in range(len(PARENTS)):
                visible_QK[node, [len(prompt) + above for above in node_path(node)]] = True
            depths = [len(node_path(node)) - 1 for node in range(len(PARENTS))]
            positions = len(prompt) + torch.tensor(depths)
            parts.append(
                SequencePart(
                    torch.tensor(drafts),
                    positions,
                    slots,
                    torch.cat([context, positions]),
                    visible_QK,
                )
            )
        return pack(parts)


def node_path(node: int) -> list[int]:
    path = [node]
    while path[-1] != 0:
        path.append(PARENTS[path[-1]])
    return path[::-1]


def plain(model: Any, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and features of transformers over one unpacked sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits, true_features(model, token_ids, ALL_TAPS)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_prefill_and_tree_pass_equal_plain_forwards(architecture: str) -> None:
    model, target = pair(architecture)
    sequences = Sequences()
    packed = sequences.prefill()
    output = target.forward(packed, sequences.pool, taps=ALL_TAPS)
    assert output.features_TF is not None
    assert output.features_TF.shape[1] == len(ALL_TAPS) * target.hidden_size
    for prompt, segment in zip(sequences.prompts, packed.segments, strict=True):
        logits, features = plain(model, prompt)
        torch.testing.assert_close(output.logits_RV[segment.rows], logits, **CLOSE)
        torch.testing.assert_close(output.features_TF[segment.rows], features, **CLOSE)
    packed = sequences.verify()
    output = target.forward(packed, sequences.pool, taps=ALL_TAPS)
    assert output.features_TF is not None
    for prompt, drafts, segment in zip(
        sequences.prompts, sequences.drafts, packed.segments, strict=True
    ):
        for node in range(len(PARENTS)):
            branch = [drafts[above] for above in node_path(node)]
            logits, features = plain(model, prompt + branch)
            row = segment.start + node
            torch.testing.assert_close(output.logits_RV[row], logits[-1], **CLOSE)
            torch.testing.assert_close(output.features_TF[row], features[-1], **CLOSE)


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_taps_come_in_the_order_asked_and_change_nothing(architecture: str) -> None:
    _, target = pair(architecture)
    first, second = Sequences(), Sequences()
    packed = first.prefill()
    everything = target.forward(packed, first.pool, taps=ALL_TAPS)
    size = target.hidden_size
    assert everything.features_TF is not None
    taps = (NUM_LAYERS, 0, 2, 2)
    some = target.forward(packed, second.pool, taps=taps)
    expected = [everything.features_TF[:, tap * size : (tap + 1) * size] for tap in taps]
    assert some.features_TF is not None
    assert torch.equal(some.features_TF, torch.cat(expected, dim=1))
    assert torch.equal(some.logits_RV, everything.logits_RV)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)


def test_without_taps_there_are_no_features() -> None:
    _, target = pair("llama")
    sequences = Sequences()
    assert target.forward(sequences.prefill(), sequences.pool).features_TF is None


def test_logits_for_the_rows_asked() -> None:
    _, target = pair("llama")
    first, second = Sequences(), Sequences()
    packed = first.prefill()
    rows_R = torch.tensor([20, 0, 21, 27])
    everything = target.forward(packed, first.pool).logits_RV
    some = target.forward(packed, second.pool, logit_rows_R=rows_R).logits_RV
    torch.testing.assert_close(some, everything[rows_R], rtol=1e-6, atol=1e-6)


def test_hooks_are_removed_when_a_pass_fails() -> None:
    _, target = pair("llama")
    sequences = Sequences()
    packed = sequences.prefill()
    with pytest.raises(IndexError):
        target.forward(packed, KVPool(2), taps=(1, 2, 3))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)
    target.forward(packed, sequences.pool, taps=(1, 2, 3))
