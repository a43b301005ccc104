"""Attention of whole documents, end to end, without a cache: what capture and training read with.

A token sees its own document up to itself, within the layer's window. On CUDA one fused call takes
all documents; elsewhere, and where a layer asks for what that call cannot do, they are attended one
by one, in blocks of queries where a mask or written-out scores would otherwise grow with the square
of the document. `attend_documents_plain` is the twin: every score of every pair of tokens.

Legend: T tokens, H query heads, G key heads, D head size.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.ops.attention import AttentionSpec, attend_fast, attend_plain, can_be_padded
from fledge.ops.documents import Documents
from fledge.ops.packed import Segment

_QUERIES_AT_ONCE = 512
_FUSED_DTYPES = (torch.bfloat16, torch.float16)
_FUSED_HEAD_SIZE = 256


def attend_documents_plain(
    query_THD: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    documents: Documents,
    spec: AttentionSpec,
) -> Tensor:
    """Written out over all pairs of tokens; returns [T, H, D]."""
    numbers_T, positions_T = documents.numbers_T, documents.positions_T
    visible_TT = numbers_T[:, None] == numbers_T[None, :]
    visible_TT &= positions_T[:, None] >= positions_T[None, :]
    everything = Segment(0, positions_T, positions_T, positions_T, visible_TT)
    return attend_plain(query_THD, keys_TGD, values_TGD, everything, spec)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of one document, and the rows of the keys that they can see."""

    segment: Segment
    key_rows: slice


@dataclass(frozen=True, slots=True)
class DocumentAttention:
    """Attention of one pass over documents; all layers share what is worked out once."""

    documents: Documents
    blocks: dict[tuple[int | None, bool], tuple[_Block, ...]] = field(
        default_factory=dict, compare=False
    )
    """By window, and whether whole documents are attended at once."""

    def attend(
        self, query_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Returns [T, H, D]."""
        if _can_be_fused(query_THD, values_TGD, spec):
            return _attend_fused(query_THD, keys_TGD, values_TGD, self.documents, spec)
        outputs = [
            attend_fast(
                query_THD[block.segment.rows],
                keys_TGD[block.key_rows],
                values_TGD[block.key_rows],
                block.segment,
                spec,
            )
            for block in self._blocks(spec)
        ]
        return torch.cat(outputs)

    def _blocks(self, spec: AttentionSpec) -> tuple[_Block, ...]:
        needs_no_mask = can_be_padded(spec)
        key = (spec.window, needs_no_mask)
        if key not in self.blocks:
            made: list[_Block] = []
            for start, length in zip(self.documents.starts, self.documents.lengths, strict=False):
                is_whole = needs_no_mask and (spec.window is None or length <= spec.window)
                at_once = length if is_whole else _QUERIES_AT_ONCE
                for first in range(0, length, max(at_once, 1)):
                    last = min(first + at_once, length)
                    made.append(self._block(start, first, last, spec.window))
            self.blocks[key] = tuple(made)
        return self.blocks[key]

    def _block(self, start: int, first: int, last: int, window: int | None) -> _Block:
        """Queries `first` to `last` of the document that begins at row `start`."""
        oldest = 0 if window is None else max(0, first - window + 1)
        positions = torch.arange(oldest, last, device=self.documents.device)
        segment = Segment(start + first, positions, positions, positions[first - oldest :], None)
        return _Block(segment, slice(start + oldest, start + last))


def _can_be_fused(query_THD: Tensor, values_TGD: Tensor, spec: AttentionSpec) -> bool:
    head_size = query_THD.shape[-1]
    return (
        query_THD.is_cuda
        and query_THD.dtype in _FUSED_DTYPES
        and can_be_padded(spec)
        and head_size == values_TGD.shape[-1]
        and head_size % 8 == 0
        and head_size <= _FUSED_HEAD_SIZE
    )


def _attend_fused(
    query_THD: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    documents: Documents,
    spec: AttentionSpec,
) -> Tensor:
    """All documents in one call of torch's flash attention."""
    out_THD: Tensor = torch.ops.aten._flash_attention_forward(
        query_THD,
        keys_TGD,
        values_TGD,
        documents.offsets_N,
        documents.offsets_N,
        documents.longest,
        documents.longest,
        0.0,
        True,
        False,
        scale=spec.scale,
        # The window counts the token itself, the kernel what lies before it.
        window_size_left=None if spec.window is None else spec.window - 1,
        window_size_right=None if spec.window is None else 0,
    )[0]
    return out_THD
