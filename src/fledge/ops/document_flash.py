"""Attention within documents with its log-sum-exp, and its backward pass for given sums.

The backward pass takes the output and the log-sum-exp as they are after further keys were merged
in: its probabilities are then those of the whole softmax, and what it returns are exactly the parts
of the gradients that run through the documents' own keys.

On CUDA both directions are torch's flash attention over all documents at once. Elsewhere, and for
what that cannot do, they are written out for one block of queries at a time.

Queries are those of the documents' suffixes; keys and values those of whole documents.

Legend: T tokens, A of them in suffixes, H query heads, G key heads, D head size, Q queries of a
block, S keys it sees.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.suffixes import Suffixes

_QUERIES_AT_ONCE = 512
_FUSED_DTYPES = (torch.bfloat16, torch.float16)
_FUSED_HEAD_SIZE = 256


class Attended(NamedTuple):
    out_AHD: Tensor
    lse_HA: Tensor
    """Log of the sum of the exponents of the scaled scores, at least float32."""


class Gradients(NamedTuple):
    query_AHD: Tensor
    keys_TGD: Tensor
    values_TGD: Tensor


class DocumentFlash:
    """Attention over documents for one scale and reach; queries are those of their suffixes."""

    def __init__(self, suffixes: Suffixes, *, scale: float, reach: int | None) -> None:
        """`reach` is how many tokens before itself a token sees, None for all of its document."""
        self._suffixes, self._documents = suffixes, suffixes.documents
        self._scale = scale
        self._reach = reach

    def forward(self, query_AHD: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> Attended:
        if not _can_be_fused(query_AHD):
            return self._forward_in_blocks(query_AHD, keys_TGD, values_TGD)
        out_AHD, lse_HA, *_ = torch.ops.aten._flash_attention_forward(
            query_AHD,
            keys_TGD,
            values_TGD,
            *self._offsets(),
            0.0,
            True,
            False,
            scale=self._scale,
            window_size_left=self._reach,
        )
        return Attended(out_AHD, lse_HA)

    def backward(
        self,
        grad_AHD: Tensor,
        query_AHD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        merged: Attended,
    ) -> Gradients:
        """Gradients of queries, keys and values, `merged` being all that the queries saw."""
        if not _can_be_fused(query_AHD):
            return self._backward_in_blocks(grad_AHD, query_AHD, keys_TGD, values_TGD, merged)
        # State of the dropout that is not used.
        unused = torch.empty(2, dtype=torch.uint64, device=query_AHD.device)
        return Gradients(
            *torch.ops.aten._flash_attention_backward(
                grad_AHD.contiguous(),
                query_AHD,
                keys_TGD,
                values_TGD,
                merged.out_AHD,
                merged.lse_HA,
                *self._offsets(),
                0.0,
                True,
                unused,
                unused,
                scale=self._scale,
                window_size_left=self._reach,
            )
        )

    def _offsets(self) -> tuple[Tensor, Tensor, int, int]:
        """Of queries and keys, and the longest of each."""
        # For single queries the kernel would change its layout.
        longest = max(self._suffixes.longest, 2)
        documents = self._documents
        return self._suffixes.offsets_N, documents.offsets_N, longest, documents.longest

    def _forward_in_blocks(
        self, query_AHD: Tensor, keys_TGD: Tensor, values_TGD: Tensor
    ) -> Attended:
        num_queries, num_heads = query_AHD.shape[:2]
        out_AHD = torch.empty_like(query_AHD)
        wide = torch.promote_types(query_AHD.dtype, torch.float32)
        lse_HA = query_AHD.new_empty((num_heads, num_queries), dtype=wide)
        for queries, keys, hidden_QS in self._blocks():
            scores_GgQS = self._scores(query_AHD[queries], keys_TGD[keys], hidden_QS)
            lse_GgQ = scores_GgQS.logsumexp(dim=-1)
            probs_GgQS = (scores_GgQS - lse_GgQ[..., None]).exp().to(values_TGD.dtype)
            values_G1SD = values_TGD[keys].transpose(0, 1)[:, None]
            out_AHD[queries] = (probs_GgQS @ values_G1SD).flatten(0, 1).transpose(0, 1)
            lse_HA[:, queries] = lse_GgQ.flatten(0, 1)
        return Attended(out_AHD, lse_HA)

    def _backward_in_blocks(
        self,
        grad_AHD: Tensor,
        query_AHD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        merged: Attended,
    ) -> Gradients:
        num_groups = keys_TGD.shape[1]
        grads = Gradients(*(torch.zeros_like(x) for x in (query_AHD, keys_TGD, values_TGD)))
        delta_HA = (grad_AHD * merged.out_AHD).to(merged.lse_HA.dtype).sum(dim=-1).T
        for queries, keys, hidden_QS in self._blocks():
            num_queries = queries.stop - queries.start
            scores_GgQS = self._scores(query_AHD[queries], keys_TGD[keys], hidden_QS)
            lse_GgQ = merged.lse_HA[:, queries].reshape(num_groups, -1, num_queries)
            delta_GgQ = delta_HA[:, queries].reshape(num_groups, -1, num_queries)
            probs_GgQS = (scores_GgQS - lse_GgQ[..., None]).exp()
            grad_GgQD = _by_group(grad_AHD[queries], num_groups)
            values_G1SD = values_TGD[keys].transpose(0, 1)[:, None]
            grad_probs_GgQS = (grad_GgQD @ values_G1SD.transpose(2, 3)).to(probs_GgQS.dtype)
            slope_GgQS = probs_GgQS * (grad_probs_GgQS - delta_GgQ[..., None]) * self._scale
            slope_GgQS = slope_GgQS.to(query_AHD.dtype)
            keys_G1SD = keys_TGD[keys].transpose(0, 1)[:, None]
            query_GgQD = _by_group(query_AHD[queries], num_groups)
            grads.query_AHD[queries] += (slope_GgQS @ keys_G1SD).flatten(0, 1).transpose(0, 1)
            grads.keys_TGD[keys] += (
                (slope_GgQS.transpose(2, 3) @ query_GgQD).sum(dim=1).transpose(0, 1)
            )
            probs_GgSQ = probs_GgQS.to(query_AHD.dtype).transpose(2, 3)
            grads.values_TGD[keys] += (probs_GgSQ @ grad_GgQD).sum(dim=1).transpose(0, 1)
        return grads

    def _blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Some queries of one document, all keys that any of them sees, and what each does not."""
        suffixes, documents = self._suffixes, self._documents
        for number, (start, stop) in enumerate(pairwise(suffixes.starts)):
            document_start, document_end = documents.starts[number : number + 2]
            behind = document_end - stop
            for first in range(start, stop, _QUERIES_AT_ONCE):
                last = min(first + _QUERIES_AT_ONCE, stop)
                oldest = document_start
                if self._reach is not None:
                    oldest = max(oldest, first + behind - self._reach)
                keys = slice(oldest, last + behind)
                rows_Q = torch.arange(first + behind, last + behind, device=documents.device)
                keys_S = torch.arange(keys.start, keys.stop, device=documents.device)
                distance_QS = rows_Q[:, None] - keys_S
                hidden_QS = distance_QS < 0
                if self._reach is not None:
                    hidden_QS |= distance_QS > self._reach
                yield slice(first, last), keys, hidden_QS

    def _scores(self, query_QHD: Tensor, keys_SGD: Tensor, hidden_QS: Tensor) -> Tensor:
        """Scaled scores [G, H/G, Q, S], -inf for what is not seen."""
        wide = torch.promote_types(query_QHD.dtype, torch.float32)
        query_GgQD = _by_group(query_QHD, keys_SGD.shape[1])
        keys_G1DS = keys_SGD.permute(1, 2, 0)[:, None]
        scores_GgQS = (query_GgQD @ keys_G1DS).to(wide) * self._scale
        return scores_GgQS.masked_fill(hidden_QS, -torch.inf)


def _by_group(states_QHD: Tensor, num_groups: int) -> Tensor:
    """[G, H/G, Q, D]: query heads beside the key head they read."""
    num_queries, num_heads, size = states_QHD.shape
    by_head_HQD = states_QHD.transpose(0, 1)
    return by_head_HQD.reshape(num_groups, num_heads // num_groups, num_queries, size)


def can_be_fused(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether one kernel attends all documents, and reads on the device where they lie."""
    is_fused_size = head_size % 8 == 0 and head_size <= _FUSED_HEAD_SIZE
    return device.type == "cuda" and dtype in _FUSED_DTYPES and is_fused_size


def _can_be_fused(query_AHD: Tensor) -> bool:
    return can_be_fused(query_AHD.device, query_AHD.dtype, query_AHD.shape[-1])
