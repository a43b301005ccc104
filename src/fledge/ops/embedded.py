"""The beginning of a pass: rows of the embedding, normed for the first layer, and of the rotations.

Legend: T tokens, V vocabulary, D width, P positions, I size of a head.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.norms import Norm, is_close, residual_norm

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
_MOST_DIMS = 16_384


class Beginning(NamedTuple):
    stream_TD: Tensor
    normed_TD: Tensor
    """What the first layer reads."""

    angles: dict[str, Tensor]
    """Rows of the tables by kind of rotation, [T, I]."""


def embed_rows(
    weight_VD: Tensor,
    token_ids_T: Tensor,
    norm: Norm,
    tables: Mapping[str, Tensor],
    positions_T: Tensor,
) -> Beginning:
    """Look tokens and positions up, and norm what the first layer reads."""

    def plain() -> Beginning:
        stream_TD, normed_TD = residual_norm(F.embedding(token_ids_T, weight_VD), before=norm)
        return Beginning(stream_TD, normed_TD, look_up(tables, positions_T))

    if not (uses_kernels(weight_VD) and _can_fuse(weight_VD, tables)):
        return plain()
    ((kind_of_rope, table_PI),) = tables.items()

    def fused() -> Beginning:
        from fledge.ops.embedded_triton import begin_rows

        with on_device(weight_VD):
            found = begin_rows(weight_VD, token_ids_T, norm, table_PI, positions_T)
        return Beginning(found[0], found[1], {kind_of_rope: found[2]})

    def is_right(found: Beginning) -> bool:
        expected = plain()
        return (
            is_close(found.stream_TD, expected.stream_TD, 0.0)
            and is_close(found.angles[kind_of_rope], expected.angles[kind_of_rope], 0.0)
            and is_close(found.normed_TD, expected.normed_TD, _MOST_DIFFERENCE[weight_VD.dtype])
        )

    kind = (weight_VD.dtype, weight_VD.shape[1], table_PI.shape[1], norm.kind)
    return run_kernel("the beginning of passes", fused, plain, kind=kind, is_right=is_right)


def look_up(tables: Mapping[str, Tensor], positions_T: Tensor) -> dict[str, Tensor]:
    """Rows of the tables at the positions."""
    return {kind: table_PI.index_select(0, positions_T) for kind, table_PI in tables.items()}


def _can_fuse(weight_VD: Tensor, tables: Mapping[str, Tensor]) -> bool:
    return (
        len(tables) == 1
        and weight_VD.dtype in _DTYPES
        and weight_VD.is_contiguous()
        and weight_VD.shape[1] <= _MOST_DIMS
    )
