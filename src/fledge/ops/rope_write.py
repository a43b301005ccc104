"""From one product to a rotated query, with keys and values in their slots.

    product row  [ q0 q1 .. | k0 k1 .. | v0 v1 .. ]
    query        normed by head if the family does, rotated, returned
    keys         the same, stored at the token's slot
    values       stored as they are

A pass gathers its rows of the rotation table once; all layers with one kind of rope share them.

Legend: T tokens, H query heads, G key heads, D head size, E = (H + 2 G) D, S slots.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.kv import written_once
from fledge.ops.norms import Norm, is_close, norm_rows

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a pass, one row for each token; the first half of D each, side by side.

    Both halves of a head turn by the same angles.
    """

    rows_TD: Tensor
    made: list[tuple[Tensor, Tensor]] = field(default_factory=list, compare=False)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the signs of the halves they go to, [T, 1, D]; made once."""
        if not self.made:
            cos, sin = self.rows_TD[:, None].chunk(2, dim=-1)
            self.made.append((torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)))
        return self.made[0]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the columns of a product are cut into heads, and how queries and keys are normed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Norm | None = None
    """By head: weights [H + G, D], those of the queries first."""


def rotate_and_store(
    product_TE: Tensor,
    rotation: Rotation,
    layout: HeadLayout,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Queries [T, H, D]; keys and values go to the pool (by kernels, if their slot is not -1)."""

    def plain() -> Tensor:
        query_THD, keys_TGD, values_TGD = rotated(product_TE, rotation, layout)
        keys_SGD[slots_T] = keys_TGD
        values_SGD[slots_T] = values_TGD
        return query_THD

    if not (uses_kernels(product_TE) and _can_fuse(product_TE, layout, keys_SGD)):
        return plain()

    def fused() -> Tensor:
        from fledge.ops.rope_write_triton import rotate_rows

        with on_device(product_TE):
            return rotate_rows(product_TE, rotation, layout, (keys_SGD, values_SGD, slots_T))

    def is_right(query_THD: Tensor) -> bool:
        limit = _MOST_DIFFERENCE[product_TE.dtype]
        is_stored = (slots_T >= 0) & written_once(slots_T)
        query, keys, values = rotated(product_TE, rotation, layout)
        return (
            is_close(query_THD, query, limit)
            and is_close(keys_SGD[slots_T[is_stored]], keys[is_stored], limit)
            and is_close(values_SGD[slots_T[is_stored]], values[is_stored], 0.0)
        )

    return run_kernel("rotations", fused, plain, kind=_kind(product_TE, layout), is_right=is_right)


def rotated(
    product_TE: Tensor, rotation: Rotation, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values [T, heads, D], the first two rotated: plain operations."""
    heads = product_TE.view(product_TE.shape[0], -1, layout.head_dim)
    num_turned = layout.num_heads + layout.num_kv_heads
    turned = heads[:, :num_turned]
    if layout.norm is not None:
        turned = norm_rows(turned, layout.norm)
    cos, sin = rotation.factors
    swapped = turned.roll(layout.head_dim // 2, dims=-1)
    turned = ((turned * cos) + (swapped * sin)).to(product_TE.dtype)
    query, keys = turned[:, : layout.num_heads], turned[:, layout.num_heads :]
    return query, keys, heads[:, num_turned:]


def split_heads(
    product_TE: Tensor, rotation: Rotation, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where nothing is stored: for documents that are read whole."""
    if not (uses_kernels(product_TE) and _can_fuse(product_TE, layout, product_TE)):
        return rotated(product_TE, rotation, layout)

    def fused() -> tuple[Tensor, Tensor, Tensor]:
        from fledge.ops.rope_write_triton import rotate_rows

        num_tokens, size = product_TE.shape[0], layout.head_dim
        keys_TGD = product_TE.new_empty(num_tokens, layout.num_kv_heads, size)
        heads = product_TE.view(num_tokens, -1, size)
        with on_device(product_TE):
            query_THD = rotate_rows(product_TE, rotation, layout, (keys_TGD, None, None))
        return query_THD, keys_TGD, heads[:, layout.num_heads + layout.num_kv_heads :]

    def is_right(found: tuple[Tensor, Tensor, Tensor]) -> bool:
        limit = _MOST_DIFFERENCE[product_TE.dtype]
        pairs = zip(found, rotated(product_TE, rotation, layout), strict=True)
        return all(is_close(ours, theirs, limit) for ours, theirs in pairs)

    kind = ("whole", *_kind(product_TE, layout))
    return run_kernel(
        "rotations",
        fused,
        lambda: rotated(product_TE, rotation, layout),
        kind=kind,
        is_right=is_right,
    )


def _kind(product_TE: Tensor, layout: HeadLayout) -> tuple[object, ...]:
    norm = None if layout.norm is None else layout.norm.kind
    return (product_TE.dtype, layout.num_heads, layout.num_kv_heads, layout.head_dim, norm)


def _can_fuse(product_TE: Tensor, layout: HeadLayout, keys: Tensor) -> bool:
    size = layout.head_dim
    return (
        product_TE.dtype in _DTYPES
        and keys.dtype == product_TE.dtype
        and product_TE.stride(1) == 1
        and size % 2 == 0
    )
