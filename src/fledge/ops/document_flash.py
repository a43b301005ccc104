"""Attention within documents with its log-sum-exp, and its backward pass for given sums.

The backward pass takes the output and the log-sum-exp as they are after further keys were merged
in: its probabilities are then those of the whole softmax, and what it returns are exactly the parts
of the gradients that run through the documents' own keys.

On CUDA both directions are torch's flash attention over all documents at once. Elsewhere, and for
what that cannot do, they are written out for one block of queries at a time.

Legend: T tokens, H query heads, G key heads, D head size, Q queries of a block, S keys it sees.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.documents import Documents

_QUERIES_AT_ONCE = 512
_FUSED_DTYPES = (torch.bfloat16, torch.float16)
_FUSED_HEAD_SIZE = 256


class Attended(NamedTuple):
    out_THD: Tensor
    lse_HT: Tensor
    """Log of the sum of the exponents of the scaled scores, at least float32."""


class Gradients(NamedTuple):
    query_THD: Tensor
    keys_TGD: Tensor
    values_TGD: Tensor


class DocumentFlash:
    """Attention over documents for one scale and reach."""

    def __init__(self, documents: Documents, *, scale: float, reach: int | None) -> None:
        """`reach` is how many tokens before itself a token sees, None for all of its document."""
        self._documents = documents
        self._scale = scale
        self._reach = reach

    def forward(self, query_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> Attended:
        if not _can_be_fused(query_THD):
            return self._forward_in_blocks(query_THD, keys_TGD, values_TGD)
        offsets_N, longest = self._documents.offsets_N, self._documents.longest
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            query_THD,
            keys_TGD,
            values_TGD,
            offsets_N,
            offsets_N,
            longest,
            longest,
            0.0,
            True,
            False,
            scale=self._scale,
            window_size_left=self._reach,
        )
        return Attended(out_THD, lse_HT)

    def backward(
        self,
        grad_THD: Tensor,
        query_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        merged: Attended,
    ) -> Gradients:
        """Gradients of queries, keys and values, `merged` being all that the queries saw."""
        if not _can_be_fused(query_THD):
            return self._backward_in_blocks(grad_THD, query_THD, keys_TGD, values_TGD, merged)
        offsets_N, longest = self._documents.offsets_N, self._documents.longest
        # State of the dropout that is not used.
        unused = torch.empty(2, dtype=torch.uint64, device=query_THD.device)
        return Gradients(
            *torch.ops.aten._flash_attention_backward(
                grad_THD.contiguous(),
                query_THD,
                keys_TGD,
                values_TGD,
                merged.out_THD,
                merged.lse_HT,
                offsets_N,
                offsets_N,
                longest,
                longest,
                0.0,
                True,
                unused,
                unused,
                scale=self._scale,
                window_size_left=self._reach,
            )
        )

    def _forward_in_blocks(
        self, query_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor
    ) -> Attended:
        num_tokens, num_heads = query_THD.shape[:2]
        out_THD = torch.empty_like(query_THD)
        wide = torch.promote_types(query_THD.dtype, torch.float32)
        lse_HT = query_THD.new_empty((num_heads, num_tokens), dtype=wide)
        for queries, keys in self._blocks():
            scores_GgQS = self._scores(query_THD[queries], keys_TGD[keys], queries, keys)
            lse_GgQ = scores_GgQS.logsumexp(dim=-1)
            probs_GgQS = (scores_GgQS - lse_GgQ[..., None]).exp().to(values_TGD.dtype)
            values_G1SD = values_TGD[keys].transpose(0, 1)[:, None]
            out_THD[queries] = (probs_GgQS @ values_G1SD).flatten(0, 1).transpose(0, 1)
            lse_HT[:, queries] = lse_GgQ.flatten(0, 1)
        return Attended(out_THD, lse_HT)

    def _backward_in_blocks(
        self,
        grad_THD: Tensor,
        query_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        merged: Attended,
    ) -> Gradients:
        num_groups = keys_TGD.shape[1]
        grads = Gradients(*(torch.zeros_like(x) for x in (query_THD, keys_TGD, values_TGD)))
        delta_HT = (grad_THD * merged.out_THD).to(merged.lse_HT.dtype).sum(dim=-1).T
        for queries, keys in self._blocks():
            num_queries = queries.stop - queries.start
            scores_GgQS = self._scores(query_THD[queries], keys_TGD[keys], queries, keys)
            lse_GgQ = merged.lse_HT[:, queries].reshape(num_groups, -1, num_queries)
            delta_GgQ = delta_HT[:, queries].reshape(num_groups, -1, num_queries)
            probs_GgQS = (scores_GgQS - lse_GgQ[..., None]).exp()
            grad_GgQD = _by_group(grad_THD[queries], num_groups)
            values_G1SD = values_TGD[keys].transpose(0, 1)[:, None]
            grad_probs_GgQS = (grad_GgQD @ values_G1SD.transpose(2, 3)).to(probs_GgQS.dtype)
            slope_GgQS = probs_GgQS * (grad_probs_GgQS - delta_GgQ[..., None]) * self._scale
            slope_GgQS = slope_GgQS.to(query_THD.dtype)
            keys_G1SD = keys_TGD[keys].transpose(0, 1)[:, None]
            query_GgQD = _by_group(query_THD[queries], num_groups)
            grads.query_THD[queries] += (slope_GgQS @ keys_G1SD).flatten(0, 1).transpose(0, 1)
            grads.keys_TGD[keys] += (
                (slope_GgQS.transpose(2, 3) @ query_GgQD).sum(dim=1).transpose(0, 1)
            )
            probs_GgSQ = probs_GgQS.to(query_THD.dtype).transpose(2, 3)
            grads.values_TGD[keys] += (probs_GgSQ @ grad_GgQD).sum(dim=1).transpose(0, 1)
        return grads

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows of some queries of one document, and rows of all keys that any of them sees."""
        documents = self._documents
        for start, length in zip(documents.starts, documents.lengths, strict=False):
            for first in range(0, length, _QUERIES_AT_ONCE):
                last = min(first + _QUERIES_AT_ONCE, length)
                oldest = 0 if self._reach is None else max(0, first - self._reach)
                yield slice(start + first, start + last), slice(start + oldest, start + last)

    def _scores(self, query_QHD: Tensor, keys_SGD: Tensor, queries: slice, keys: slice) -> Tensor:
        """Scaled scores [G, H/G, Q, S], -inf for what is not seen."""
        wide = torch.promote_types(query_QHD.dtype, torch.float32)
        query_GgQD = _by_group(query_QHD, keys_SGD.shape[1])
        keys_G1DS = keys_SGD.permute(1, 2, 0)[:, None]
        scores_GgQS = (query_GgQD @ keys_G1DS).to(wide) * self._scale
        device = query_QHD.device
        distance_QS = (
            torch.arange(queries.start, queries.stop, device=device)[:, None]
            - torch.arange(keys.start, keys.stop, device=device)[None, :]
        )
        hidden_QS = distance_QS < 0
        if self._reach is not None:
            hidden_QS |= distance_QS > self._reach
        return scores_GgQS.masked_fill(hidden_QS, -torch.inf)


def _by_group(states_QHD: Tensor, num_groups: int) -> Tensor:
    """[G, H/G, Q, D]: query heads beside the key head they read."""
    num_queries, num_heads, size = states_QHD.shape
    by_head_HQD = states_QHD.transpose(0, 1)
    return by_head_HQD.reshape(num_groups, num_heads // num_groups, num_queries, size)


def _can_be_fused(query_THD: Tensor) -> bool:
    head_size = query_THD.shape[-1]
    return (
        query_THD.is_cuda
        and query_THD.dtype in _FUSED_DTYPES
        and head_size % 8 == 0
        and head_size <= _FUSED_HEAD_SIZE
    )
