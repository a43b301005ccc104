"""The residual stream between two sub-layers: what came back, added, and normed for what follows.

    after   norms what a sub-layer returned before it is added (OLMo, Gemma)
    before  norms the stream for the next sub-layer (Llama, Qwen, Gemma)

All families norm in float32; they differ in when they return to the model's precision:

    "cast_first"  weight * normed.to(dtype)          Llama, Mistral, Qwen
    "cast_last"   (weight * normed).to(dtype)        OLMo
    "one_plus"    ((1 + weight) * normed).to(dtype)  Gemma

Legend: T tokens, D width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels

NormKind = Literal["cast_first", "cast_last", "one_plus"]
_MOST_DIMS = 16_384
"""Of a row, which one program holds."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Norm:
    weight_D: Tensor
    eps: float
    kind: NormKind


def residual_norm(
    fresh_TD: Tensor,
    stream_TD: Tensor | None = None,
    *,
    after: Norm | None = None,
    before: Norm | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream with `fresh` added, and that normed; without `before` both are the stream."""

    def norm_plain() -> tuple[Tensor, Tensor]:
        fresh = fresh_TD if after is None else norm_rows(fresh_TD, after)
        stream = fresh if stream_TD is None else stream_TD + fresh
        return stream, stream if before is None else norm_rows(stream, before)

    if not (uses_kernels(fresh_TD) and _can_fuse(fresh_TD)):
        return norm_plain()

    def norm_fused() -> tuple[Tensor, Tensor]:
        from fledge.ops.norms_triton import add_and_norm

        with on_device(fresh_TD):
            return add_and_norm(fresh_TD, stream_TD, after, before)

    def is_right(found: tuple[Tensor, Tensor]) -> bool:
        pairs = zip(found, norm_plain(), strict=True)
        return all(is_close(one, other, _MOST_DIFFERENCE[one.dtype]) for one, other in pairs)

    asked = (stream_TD is None, after and after.kind, before and before.kind)
    kind = (fresh_TD.dtype, fresh_TD.shape[1], *asked)
    return run_kernel("norms", norm_fused, norm_plain, kind=kind, is_right=is_right)


def norm_rows(rows: Tensor, norm: Norm) -> Tensor:
    """RMS norm over the last dimension, as transformers writes it."""
    normed = torch.rms_norm(rows.float(), rows.shape[-1:], None, norm.eps)
    if norm.kind == "cast_first":
        return norm.weight_D * normed.to(rows.dtype)
    if norm.kind == "cast_last":
        return (norm.weight_D * normed).to(rows.dtype)
    return (normed * (1.0 + norm.weight_D.float())).to(rows.dtype)


def is_close(ours: Tensor, theirs: Tensor, limit: float) -> bool:
    """Within rounding of each other; what is not a number on both sides says nothing."""
    ours, theirs = ours.float(), theirs.float()
    return not bool((ours - theirs).norm() > limit * theirs.norm())


def _can_fuse(rows_TD: Tensor) -> bool:
    return (
        rows_TD.dtype in _DTYPES
        and rows_TD.dim() == 2
        and rows_TD.stride(1) == 1
        and rows_TD.shape[1] <= _MOST_DIMS
    )
