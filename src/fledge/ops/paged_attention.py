"""Attention over pages by one kernel for all requests of a pass, where the layer allows it.

The twin attends what `PassView` says, request by request or padded; both read the same memory.

Legend: T rows of the pass, S slots, H query heads, G key heads, D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.kernel_choice import on_device, run_kernel
from fledge.ops.paged_rows import PagedRows

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIMS = 256
_MOST_DIFFERENCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 3e-3}
"""From the twin, over all rows: rounding stays well below, also that of TF32 products in a twin."""


def attend_pages(
    rows: PagedRows,
    query_THD: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    spec: AttentionSpec,
    twin: Callable[[], Tensor],
) -> Tensor:
    """Attention of all rows over the pool's keys, theirs included; returns [T, H, D]."""
    if not _can_attend(query_THD, keys_SGD, values_SGD):
        return twin()

    def attend_fused() -> Tensor:
        from fledge.ops.paged_attention_triton import attend_paged

        with on_device(query_THD):
            return attend_paged(rows, query_THD, keys_SGD, values_SGD, spec)

    def is_right(out_THD: Tensor) -> bool:
        wanted_THD = twin().float()
        difference = (out_THD.float() - wanted_THD).norm() / wanted_THD.norm()
        # What is not a number on both sides says nothing against the kernel.
        return not bool(difference > _MOST_DIFFERENCE[query_THD.dtype])

    name = f"attention with heads of {query_THD.shape[2]} in {query_THD.dtype}"
    kind = _kind(rows, query_THD, values_SGD, spec)
    return run_kernel(name, attend_fused, twin, kind=kind, is_right=is_right)


def _kind(
    rows: PagedRows, query_THD: Tensor, values_SGD: Tensor, spec: AttentionSpec
) -> tuple[object, ...]:
    """Roughly what the kernel is compiled for, from sizes that the host knows."""
    group = query_THD.shape[1] // values_SGD.shape[1]
    asked = (spec.window is None, spec.soft_cap is None, spec.sinks_H is None)
    return (
        type(rows.rows),
        rows.seen_BRS is None,
        *asked,
        *values_SGD.shape[1:],
        min(128, rows.num_rows * group // rows.num_requests).bit_length(),
        rows.num_requests.bit_length(),
    )


def _can_attend(query_THD: Tensor, keys_SGD: Tensor, values_SGD: Tensor) -> bool:
    dtypes = {query_THD.dtype, keys_SGD.dtype, values_SGD.dtype}
    widest = max(query_THD.shape[2], values_SGD.shape[2])
    return len(dtypes) == 1 and query_THD.dtype in _DTYPES and widest <= _MOST_DIMS
