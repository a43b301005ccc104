"""Penalties on tokens that were said before, counted on each request's own path.

Repetition divides (or multiplies, below zero) the logits of tokens in the prompt or the answer, as
transformers does. Presence and frequency subtract, for tokens of the answer only, as in OpenAI's
interface. A walk down a tree records every token it emits, so a node deep in the tree is judged
with its ancestors counted, exactly as plain decoding would judge it.

Legend: B requests, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Said:
    """What one request has read and said before this pass."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class Penalties:
    """Token counts of a batch while it is walked."""

    def __init__(self, said: Sequence[Said], vocab_size: int, device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        self._repetition_B1 = column([one.params.repetition_penalty or 1.0 for one in said])
        self._presence_B1 = column([one.params.presence_penalty for one in said])
        self._frequency_B1 = column([one.params.frequency_penalty for one in said])
        self._counts_BV = torch.zeros(len(said), vocab_size, dtype=torch.float64, device=device)
        self._seen_BV = torch.zeros(len(said), vocab_size, dtype=torch.bool, device=device)
        for row, one in enumerate(said):
            prompt = torch.tensor(one.prompt_token_ids, dtype=torch.long, device=device)
            output = torch.tensor(one.output_token_ids, dtype=torch.long, device=device)
            self._counts_BV[row] = torch.bincount(output, minlength=vocab_size)
            self._seen_BV[row, prompt] = True
            self._seen_BV[row, output] = True

    def apply(self, logits_BV: Tensor) -> Tensor:
        """Penalised logits, float64."""
        logits_BV = logits_BV.double()
        shrunk_BV = torch.where(
            logits_BV < 0, logits_BV * self._repetition_B1, logits_BV / self._repetition_B1
        )
        logits_BV = torch.where(self._seen_BV, shrunk_BV, logits_BV)
        said_BV = self._counts_BV > 0
        return logits_BV - self._presence_B1 * said_BV - self._frequency_B1 * self._counts_BV

    def record(self, token_B: Tensor) -> None:
        """Each request has just emitted a token."""
        self._counts_BV.scatter_add_(
            1, token_B[:, None], torch.ones_like(token_B, dtype=torch.float64)[:, None]
        )
        self._seen_BV.scatter_(1, token_B[:, None], True)


def make_penalties(said: Sequence[Said], vocab_size: int, device: torch.device) -> Penalties | None:
    """None when no request asks for a penalty: then there is nothing to count."""
    if not any(one.params.has_penalties for one in said):
        return None
    return Penalties(said, vocab_size, device)
