"""Rules that change a request's logits before sampling, judged on each node's own path.

In transformers' order:

    bias         added to the logits of chosen tokens
    repetition   divides (below zero: multiplies) the logits of tokens in the prompt or the answer
    presence     subtracted from the logits of tokens of the answer, as in OpenAI's interface
    frequency    the same, once for each time the token was said
    min tokens   the tokens that would end the answer are impossible until it is long enough

The penalties need to know what was read and said. `TokenCounts` keeps that on the device, one row
for each request that asks. A walk records every token it emits there, so a node deep in the tree is
judged with its ancestors counted, and the next cycle goes on from the same row: the host neither
counts nor waits. That holds because all that a walk emits is committed, unless the request ends.

Legend: B requests of a batch, P of them with penalties, I of these in a portion, S rows of
counts, V vocabulary, E entries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.portions import portions

_MIN_ROWS = 4


class TokenCounts:
    """What the requests with penalties have read and said, one row each; rows are used again."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.is_read_SV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        """Tokens of the prompts."""

        self.num_said_SV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """How often a token is in the answer."""

        self._free: list[int] = []

    @property
    def num_rows(self) -> int:
        return self.is_read_SV.shape[0]

    @property
    def num_open(self) -> int:
        """Rows that belong to a request."""
        return self.num_rows - len(self._free)

    def open(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> int:
        """A row with these tokens counted."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        prompt = torch.tensor(prompt_token_ids, dtype=torch.long, device=self.device)
        output = torch.tensor(output_token_ids, dtype=torch.long, device=self.device)
        self.is_read_SV[row] = False
        self.is_read_SV[row].index_fill_(0, prompt, True)
        self.num_said_SV[row] = 0
        self.num_said_SV[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return row

    def close(self, row: int) -> None:
        self._free.append(row)

    def _grow(self) -> None:
        """Twice as many rows; those in use keep their place."""
        num_new = max(_MIN_ROWS, self.num_rows)
        self._free.extend(range(self.num_rows, self.num_rows + num_new))
        shape = (num_new, self.vocab_size)
        self.is_read_SV = torch.cat([self.is_read_SV, self.is_read_SV.new_zeros(shape)])
        self.num_said_SV = torch.cat([self.num_said_SV, self.num_said_SV.new_zeros(shape)])


class RequestRules:
    """The rules of one request, from its first walk to its end."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: frozenset[int],
        counts: TokenCounts,
    ) -> None:
        """`output_token_ids` is the growing answer itself; it is read when a row is opened."""
        self.params = params
        self.counts = counts
        self.bias = dict(params.logit_bias)
        # A target may name an end-of-text id that it has no logit for.
        self.eos_token_ids = sorted(t for t in eos_token_ids if t < counts.vocab_size)
        self._prompt_token_ids, self._output_token_ids = prompt_token_ids, output_token_ids
        self._row: int | None = None

    @property
    def is_any(self) -> bool:
        params = self.params
        return params.has_penalties or bool(self.bias) or params.min_tokens > 0

    def row(self) -> int:
        """Its row of counts, opened when it is first asked for."""
        if self._row is None:
            self._row = self.counts.open(self._prompt_token_ids, self._output_token_ids)
        return self._row

    def release(self) -> None:
        """Give the row back: the request has ended, or must wait and will be counted anew."""
        if self._row is not None:
            self.counts.close(self._row)
            self._row = None


class _Entries:
    """Single logits of a batch, each with a number of its own."""

    def __init__(self, entries: list[tuple[int, int, float]], device: torch.device) -> None:
        rows, token_ids, values = zip(*entries, strict=True)
        self.place_E = (
            torch.tensor(rows, device=device),
            torch.tensor(token_ids, device=device),
        )
        self.value_E = torch.tensor(values, dtype=torch.float64, device=device)


class _Penalties:
    """Repetition, presence and frequency, for the requests that have one of them."""

    def __init__(self, chosen: dict[int, RequestRules], counts: TokenCounts) -> None:
        device = counts.device

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        params = [rules.params for rules in chosen.values()]
        self._counts = counts
        self._row_P = torch.tensor(list(chosen), device=device)
        self._place_P = torch.tensor([rules.row() for rules in chosen.values()], device=device)
        self._repetition_P1 = column([one.repetition_penalty or 1.0 for one in params])
        self._presence_P1 = column([one.presence_penalty for one in params])
        self._frequency_P1 = column([one.frequency_penalty for one in params])

    def apply_to(self, logits_BV: Tensor, wanted_B: Tensor | None) -> None:
        """In place; rows that are not wanted may stay as they are."""
        for index_I in portions(self._row_P, logits_BV.shape[-1], wanted_B):
            row_I = self._row_P[index_I]
            logits_BV.index_copy_(0, row_I, self._penalised(logits_BV[row_I], index_I))

    def _penalised(self, logits_IV: Tensor, index_I: Tensor) -> Tensor:
        place_I, repetition_I1 = self._place_P[index_I], self._repetition_P1[index_I]
        num_said_IV = self._counts.num_said_SV[place_I]
        is_said_IV = num_said_IV > 0
        is_seen_IV = self._counts.is_read_SV[place_I] | is_said_IV
        shrunk_IV = torch.where(logits_IV < 0, logits_IV * repetition_I1, logits_IV / repetition_I1)
        logits_IV = torch.where(is_seen_IV, shrunk_IV, logits_IV)
        presence_IV = self._presence_P1[index_I] * is_said_IV
        return logits_IV - presence_IV - self._frequency_P1[index_I] * num_said_IV

    def record(self, token_B: Tensor, counts_B: Tensor) -> None:
        place_P = (self._place_P, token_B[self._row_P])
        self._counts.num_said_SV.index_put_(place_P, counts_B[self._row_P].int(), accumulate=True)


class LogitRules:
    """The rules of a batch; what changes is in the counts, so it serves while the batch lasts."""

    def __init__(self, requests: Sequence[RequestRules], counts: TokenCounts) -> None:
        device = counts.device
        bias = [(row, *pair) for row, one in enumerate(requests) for pair in one.bias.items()]
        ends = [
            (row, token_id, float(one.params.min_tokens))
            for row, one in enumerate(requests)
            if one.params.min_tokens
            for token_id in one.eos_token_ids
        ]
        penalised = {row: one for row, one in enumerate(requests) if one.params.has_penalties}
        self._bias = _Entries(bias, device) if bias else None
        self._ends = _Entries(ends, device) if ends else None
        self._penalties = _Penalties(penalised, counts) if penalised else None

    def apply(
        self, logits_BV: Tensor, position_B: Tensor, wanted_B: Tensor | None = None
    ) -> Tensor:
        """The logits under the rules, float64; `position` is the number of tokens said so far.

        Rows that are not wanted may be left as they are.
        """
        logits_BV = logits_BV.to(torch.float64, copy=True)
        if self._bias is not None:
            logits_BV.index_put_(self._bias.place_E, self._bias.value_E, accumulate=True)
        if self._penalties is not None:
            self._penalties.apply_to(logits_BV, wanted_B)
        if self._ends is not None:
            is_early_E = position_B[self._ends.place_E[0]] < self._ends.value_E
            ends_E = logits_BV[self._ends.place_E].masked_fill(is_early_E, float("-inf"))
            logits_BV.index_put_(self._ends.place_E, ends_E)
        return logits_BV

    def record(self, token_B: Tensor, counts_B: Tensor) -> None:
        """Each request has emitted a token; it is counted where `counts` says so."""
        if self._penalties is not None:
            self._penalties.record(token_B, counts_B)


def make_rules(requests: Sequence[RequestRules]) -> LogitRules | None:
    """The rules of a batch, None when no request has any."""
    if not any(one.is_any for one in requests):
        return None
    return LogitRules(requests, requests[0].counts)
