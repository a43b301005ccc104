"""What a draft head reads of a token: its embedding and the hidden state before it, side by side.

    row  [ embedding of the token, normed | hidden state, normed ]

Legend: T tokens, V vocabulary, D hidden size, X rows that hidden states are picked from, E = 2 D.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.norms import Norm, is_close, norm_rows

_MOST_DIMS = 16_384
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def join_inputs(
    token_ids_T: Tensor,
    embedding_VD: Tensor,
    hidden_XD: Tensor,
    rows_T: Tensor,
    norms: tuple[Norm, Norm],
    *,
    keeps_normed: bool,
) -> tuple[Tensor, Tensor]:
    """Both halves normed [T, E], and the picked hidden states [T, D], normed where asked."""

    def join_plain() -> tuple[Tensor, Tensor]:
        hidden_TD = hidden_XD.index_select(0, rows_T)
        normed_TD = norm_rows(hidden_TD, norms[1])
        embeds_TD = norm_rows(F.embedding(token_ids_T, embedding_VD), norms[0])
        x_TE = torch.cat([embeds_TD, normed_TD], dim=-1)
        return x_TE, normed_TD if keeps_normed else hidden_TD

    if not (uses_kernels(hidden_XD) and _can_fuse(embedding_VD, hidden_XD, norms)):
        return join_plain()

    def join_fused() -> tuple[Tensor, Tensor]:
        from fledge.ops.head_input_triton import join_rows

        with on_device(hidden_XD):
            return join_rows(
                token_ids_T, embedding_VD, hidden_XD, rows_T, norms, keeps_normed=keeps_normed
            )

    def is_right(found: tuple[Tensor, Tensor]) -> bool:
        pairs = zip(found, join_plain(), strict=True)
        return all(is_close(one, other, _MOST_DIFFERENCE[one.dtype]) for one, other in pairs)

    kind = (hidden_XD.dtype, hidden_XD.shape[1], keeps_normed)
    return run_kernel("inputs of a head", join_fused, join_plain, kind=kind, is_right=is_right)


def _can_fuse(embedding_VD: Tensor, hidden_XD: Tensor, norms: tuple[Norm, Norm]) -> bool:
    return (
        (norms[0].eps, norms[0].kind) == (norms[1].eps, norms[1].kind)
        and hidden_XD.dtype in _DTYPES
        and embedding_VD.dtype == hidden_XD.dtype
        and embedding_VD.stride(1) == hidden_XD.stride(1) == 1
        and hidden_XD.shape[1] <= _MOST_DIMS
    )
