"""Whether answers with a head are those without it, and if not, whether it was a near-tie.

In float32 they are equal. In shorter numbers a pass over a tree rounds differently from a pass over
one token, so a token may change where the two best logits are nearly equal; that is counted. A
difference with a clear margin is an error of the engine, and no figure of such a head counts.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.lab.measure import Answer
from fledge.lab.visit_records import VisitRecord, paired_answers
from fledge.models.target import Target
from fledge.ops.kv import KVPool
from fledge.ops.packed import SequencePart, pack

MAX_STEPS = 8
"""Distances between neighbouring numbers at the size of the best logit that are a near-tie."""

_MAX_EXAMINED = 20
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 13}
"""float32 sums of another order differ in more than the last of their 23 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which two answers part."""

    question: str
    repeat: int
    position: int
    margin: float | None = None
    """Between the two tokens in the target's logits; None where it was not looked at."""

    steps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How the answers with a head compare with those without."""

    num_compared: int
    num_different: int
    first: tuple[Difference, ...]
    """Some of them, with their margins."""

    @property
    def clear(self) -> Difference | None:
        """One that was no near-tie."""
        found = (one for one in self.first if one.steps is not None and one.steps > MAX_STEPS)
        return next(found, None)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_compared": self.num_compared,
            "num_different": self.num_different,
            "first": [asdict(one) for one in self.first],
        }


def compare(
    records: Sequence[VisitRecord],
    head: str,
    target: Target,
    prompts: dict[str, tuple[int, ...]],
    *,
    is_greedy: bool,
) -> Differences:
    """`prompts` has the token ids of each question. Sampled answers have no margin to look at."""
    pairs = [
        (record, own, plain)
        for record, own, plain in paired_answers(records, head)
        if own.error is None and plain.error is None
    ]
    parted = [
        (record, own, plain) for record, own, plain in pairs if own.token_ids != plain.token_ids
    ]
    first = tuple(
        _examine(target, prompts[own.question], record.repeat, own, plain, is_greedy=is_greedy)
        for record, own, plain in parted[:_MAX_EXAMINED]
    )
    return Differences(num_compared=len(pairs), num_different=len(parted), first=first)


def _examine(
    target: Target,
    prompt: tuple[int, ...],
    repeat: int,
    own: Answer,
    plain: Answer,
    *,
    is_greedy: bool,
) -> Difference:
    pairs = enumerate(zip(own.token_ids, plain.token_ids, strict=False))
    shorter = min(own.num_tokens, plain.num_tokens)
    position = next((i for i, (one, other) in pairs if one != other), shorter)
    if not is_greedy or position == shorter:
        return Difference(question=own.question, repeat=repeat, position=position)
    logits_V = logits_after(target, [*prompt, *plain.token_ids[:position]])
    chosen = logits_V[[plain.token_ids[position], own.token_ids[position]]].tolist()
    margin = abs(chosen[0] - chosen[1])
    size = max(float(logits_V.max().abs()), 1e-6)
    spacing = 2.0 ** (math.floor(math.log2(size)) - _MANTISSA_BITS[target.dtype])
    return Difference(
        question=own.question,
        repeat=repeat,
        position=position,
        margin=margin,
        steps=margin / spacing,
    )


@torch.no_grad()
def logits_after(target: Target, token_ids: Sequence[int]) -> Tensor:
    """The target's logits for the token that follows, by one plain pass over the whole text."""
    places_Q = torch.arange(len(token_ids), device=target.device)
    part = SequencePart(
        token_ids_Q=torch.tensor(list(token_ids), device=target.device),
        positions_Q=places_Q,
        key_slots_K=places_Q,
        key_positions_K=places_Q,
    )
    output = target.forward(pack([part]), KVPool(len(token_ids)), logit_rows_R=places_Q[-1:])
    return output.logits_RV[0].float().cpu()
