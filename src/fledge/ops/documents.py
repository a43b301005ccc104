"""Whole sequences end to end, each read from its start: what capture and training work on.

    lengths 3, 2        tokens [a0 a1 a2 | b0 b1]    offsets [0 3 5]    positions [0 1 2 0 1]

A token sees the tokens of its own document up to itself; there is no cache. Where a fixed number of
tokens is wanted, the rest is filled with documents of padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where each document lies. Legend: T tokens, N documents."""

    lengths: tuple[int, ...]
    """Known to the host, padding included."""

    device: torch.device

    bound: int | None = None
    """No shorter than the longest of any documents that captured work will be replayed for."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Or the bound, where there is one."""
        return max(self.lengths, default=0) if self.bound is None else self.bound

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each document, and where the last one ends."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)

    @cached_property
    def offsets_N(self) -> Tensor:
        """The same on the device, int32 [N+1], as fused attention asks for."""
        return self.sent(self.starts).to(torch.int32)

    @cached_property
    def positions_T(self) -> Tensor:
        """Of each token within its document."""
        counts, starts_N = self.sent(self.lengths), self.sent(self.starts[:-1])
        all_T = torch.arange(self.num_tokens, device=self.device)
        return all_T - torch.repeat_interleave(starts_N, counts, output_size=self.num_tokens)

    @cached_property
    def numbers_T(self) -> Tensor:
        """Which document each token belongs to."""
        counts = self.sent(self.lengths)
        numbers_N = torch.arange(len(self.lengths), device=self.device)
        return torch.repeat_interleave(numbers_N, counts, output_size=self.num_tokens)

    def sent(self, numbers: Sequence[int]) -> Tensor:
        """On the device, without waiting for what it still has to do."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)


def make_documents(
    lengths: Sequence[int], device: torch.device, *, padded_to: int | None = None
) -> Documents:
    """Documents of these lengths; padding goes into further ones, none longer than the longest."""
    filled = list(lengths)
    missing = 0 if padded_to is None else padded_to - sum(filled)
    longest = max(filled, default=missing)
    while missing > 0:
        filled.append(min(missing, longest))
        missing -= filled[-1]
    return Documents(tuple(filled), device)
