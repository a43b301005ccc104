"""One forward pass over several sequences laid end to end, without padding.

A pass carries T new tokens. Each sequence owns a contiguous run of them (a `Segment`) and names the
cache slots of every key it may see: its committed context first, then its own new tokens.

    sequence a: context a0 a1, new a2 a3      sequence b: context b0, new b1
    tokens     [a2 a3 | b1]                   segments  (start 0, len 2), (start 2, len 1)
    key slots  a: [a0 a1 a2 a3]   b: [b0 b1]  visible_QK of a, causal:  1 1 1 0
                                                                        1 1 1 1
Inside a draft tree `visible_QK` says "is an ancestor or the node itself". A sliding window narrows
it further, and counts positions, never slots: siblings share a position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a pass."""

    start: int
    """Row of its first new token in the pass."""

    key_slots_K: Tensor
    """Cache slots of its visible keys; the last `len` of them belong to its new tokens."""

    key_positions_K: Tensor
    query_positions_Q: Tensor

    visible_QK: Tensor | None
    """Which keys each new token sees; None means causal: all context, then up to itself."""

    masks: dict[int | None, Tensor | None] = field(default_factory=dict, compare=False)
    """Masks by window, made once per pass and shared by all layers."""

    @property
    def len(self) -> int:
        return self.query_positions_Q.shape[0]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.len)

    def mask(self, window: int | None) -> Tensor | None:
        """Boolean [Q, K] mask for a layer with this window; None when every key is visible."""
        if window not in self.masks:
            self.masks[window] = self._build_mask(window)
        return self.masks[window]

    def is_whole_causal(self, window: int | None) -> bool:
        """A sequence read from its start, every token seeing all before it: needs no mask."""
        return (
            self.visible_QK is None
            and self.len == self.key_slots_K.shape[0]
            and (window is None or self.len <= window)
        )

    def _build_mask(self, window: int | None) -> Tensor | None:
        distance_QK = self.query_positions_Q[:, None] - self.key_positions_K[None, :]
        visible_QK = self.visible_QK
        if visible_QK is None:
            if self.len == 1 and (window is None or self.key_slots_K.shape[0] <= window):
                return None
            visible_QK = distance_QK >= 0
        if window is not None:
            visible_QK = visible_QK & (distance_QK < window)
        return visible_QK


def tree_mask(num_context: int, chain: int, seen_NN: Tensor) -> Tensor:
    """Context, then the chain causally, then each tree node its ancestors; the root ends the chain.

    Boolean [rows, context + rows].
    """
    num_drafts = seen_NN.shape[0] - 1
    num_rows = chain + num_drafts
    visible_QK = seen_NN.new_ones(num_rows, num_context + num_rows)
    visible_QK[:, num_context:] = visible_QK[:, num_context:].tril()
    visible_QK[chain:, num_context + chain :] = seen_NN[1:, 1:]
    return visible_QK


@dataclass(frozen=True, slots=True)
class PaddedRequests:
    """The first requests of a pass side by side, padded to the longest: one call attends them all.

    Legend: B requests, Q rows of the longest, K keys of the longest, T their rows in the pass.
    """

    rows_BQ: Tensor
    """Row of the pass; padding repeats a real row."""

    slots_BK: Tensor
    """Padding repeats a slot that was written: what it holds is masked, but must be numbers."""

    mask_BQK: Tensor
    place_T: tuple[Tensor, Tensor]
    """Request and row within it of each row of the pass."""


@dataclass(frozen=True, slots=True)
class PassView:
    """A pass as layers with one kind of attention see it."""

    write_slots_T: Tensor
    """Where each new token's key and value go."""

    make_padded: Callable[[], PaddedRequests | None]
    make_segments: Callable[[int], tuple[Segment, ...]]
    made: dict[int, tuple[Segment, ...]] = field(default_factory=dict, compare=False)
    made_padded: list[PaddedRequests | None] = field(default_factory=list, compare=False)

    @property
    def padded(self) -> PaddedRequests | None:
        """Requests with few rows each, if that pays; made once and shared by all layers."""
        if not self.made_padded:
            self.made_padded.append(self.make_padded())
        return self.made_padded[0]

    def segments(self, first: int = 0) -> tuple[Segment, ...]:
        """One by one, from the given request on; made once and shared by all layers."""
        if first not in self.made:
            self.made[first] = self.make_segments(first)
        return self.made[first]


@dataclass(frozen=True, slots=True)
class PackedPass:
    """The flat tensors of one pass; all layers share one set of slots."""

    token_ids_T: Tensor
    positions_T: Tensor
    write_slots_T: Tensor
    """Where each new token's key and value go."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    def view(self, window: int | None) -> PassView:
        del window
        return PassView(self.write_slots_T, lambda: None, lambda first: self.segments[first:])

    def paged(self, window: int | None) -> None:
        """Slots in any order are no pages."""
        del window


@dataclass(frozen=True, slots=True)
class SequencePart:
    """What one sequence brings to a pass, before it is laid beside the others."""

    token_ids_Q: Tensor
    positions_Q: Tensor
    key_slots_K: Tensor
    key_positions_K: Tensor
    visible_QK: Tensor | None = None


def pack(parts: list[SequencePart]) -> PackedPass:
    """Lay the parts end to end."""
    segments = []
    start = 0
    for part in parts:
        segments.append(
            Segment(
                start=start,
                key_slots_K=part.key_slots_K,
                key_positions_K=part.key_positions_K,
                query_positions_Q=part.positions_Q,
                visible_QK=part.visible_QK,
            )
        )
        start += part.token_ids_Q.shape[0]
    return PackedPass(
        token_ids_T=torch.cat([part.token_ids_Q for part in parts]),
        positions_T=torch.cat([part.positions_Q for part in parts]),
        write_slots_T=torch.cat([part.key_slots_K[-part.token_ids_Q.shape[0] :] for part in parts]),
        segments=tuple(segments),
    )
