"""The ends of documents, from where labels are reached: the rest only has to be seen.

    document    p p p p p p a a a a        loss on the answer a, which K steps reach from here on
    suffix            - - - - - - -

Legend: T tokens of the documents, A tokens of their suffixes, N documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fledge.ops.documents import Documents


@dataclass(frozen=True)
class Suffixes:
    """The last tokens of each document, end to end."""

    documents: Documents
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Or the documents' bound, where there is one."""
        bound = self.documents.bound
        return max(self.lengths, default=0) if bound is None else bound

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each suffix among all of them, and where the last one ends."""
        return (0, *accumulate(self.lengths))

    @cached_property
    def offsets_N(self) -> Tensor:
        """The same on the device, int32 [N+1], as fused attention asks for."""
        return self.documents.sent(self.starts).int()

    @cached_property
    def rows_A(self) -> Tensor:
        """Of the documents' tokens."""
        ends = zip(self.documents.starts[1:], self.starts[1:], strict=True)
        device = self.documents.device
        behind_N = self.documents.sent([end - own_end for end, own_end in ends])
        counts_N = self.documents.sent(self.lengths)
        num_tokens = self.num_tokens
        behind_A = torch.repeat_interleave(behind_N, counts_N, output_size=num_tokens)
        return torch.arange(num_tokens, device=device) + behind_A

    @cached_property
    def numbers_T(self) -> Tensor:
        """Number of each of the documents' tokens among the suffixes; meaningless outside them."""
        device = self.documents.device
        nothing_T = torch.zeros(self.documents.num_tokens, dtype=torch.long, device=device)
        return nothing_T.index_copy(0, self.rows_A, torch.arange(self.num_tokens, device=device))


def whole(documents: Documents) -> Suffixes:
    """All of each document."""
    return Suffixes(documents, documents.lengths)


def reaching(
    documents: Documents, first_labels: Sequence[int] | None, num_steps: int
) -> Suffixes | None:
    """Where labels are reached from in so many steps; None for everywhere.

    `first_labels` are the first rows with a label within each document, its length for none.
    Documents behind the last one that is named are padding. Of each that is not empty, one token
    stays at least.
    """
    if first_labels is None:
        return None
    firsts = (*first_labels, *documents.lengths[len(first_labels) :])
    lengths = tuple(
        min(1, length) if first >= length else length - max(0, first - num_steps)
        for first, length in zip(firsts, documents.lengths, strict=True)
    )
    return None if lengths == documents.lengths else Suffixes(documents, lengths)


def lengthened_to(suffixes: Suffixes, num_tokens: int) -> Suffixes:
    """So many tokens together: suffixes begin earlier, the first documents' at first."""
    missing = num_tokens - suffixes.num_tokens
    lengths = []
    for own, length in zip(suffixes.lengths, suffixes.documents.lengths, strict=True):
        more = min(missing, length - own)
        lengths.append(own + more)
        missing -= more
    assert missing == 0, "documents have no more tokens"
    return Suffixes(suffixes.documents, tuple(lengths))
