"""Attention over pages by one kernel for all requests of a pass, where the layer allows it.

The twin attends what `PassView` says, request by request or padded; both read the same memory.

Legend: T rows of the pass, S slots, H query heads, G key heads, D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.kernel_choice import run_kernel
from fledge.ops.paged_rows import PagedRows

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIMS = 256


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

        return attend_paged(rows, query_THD, keys_SGD, values_SGD, spec)

    name = f"attention with heads of {query_THD.shape[2]} in {query_THD.dtype}"
    return run_kernel(name, attend_fused, twin)


def _can_attend(query_THD: Tensor, keys_SGD: Tensor, values_SGD: Tensor) -> bool:
    dtypes = {query_THD.dtype, keys_SGD.dtype, values_SGD.dtype}
    widest = max(query_THD.shape[2], values_SGD.shape[2])
    return len(dtypes) == 1 and query_THD.dtype in _DTYPES and widest <= _MOST_DIMS
