"""Forbids tokens by bit masks, as grammars say them: one row of bits for each row of logits.

Legend: R rows of logits, M of them with a mask, V vocabulary, Y bytes of a mask.
"""

import torch
from torch import Tensor

from fledge.ops.portions import portions

_BITS = 8


def mask_rows(logits_RV: Tensor, rows_M: Tensor, masks_MY: Tensor) -> None:
    """Make the tokens whose bit is not set impossible, in place.

    Bit b of byte y stands for token 8 y + b; masks may be longer than the rows.
    """
    bit_8 = torch.arange(_BITS, dtype=torch.uint8, device=logits_RV.device)
    num_tokens = logits_RV.shape[1]
    for index_I in portions(rows_M, num_tokens):
        bits_IV = ((masks_MY[index_I, :, None] >> bit_8) & 1).flatten(1)[:, :num_tokens]
        rows_I = rows_M[index_I]
        masked_IV = logits_RV[rows_I].masked_fill(bits_IV == 0, float("-inf"))
        logits_RV.index_copy_(0, rows_I, masked_IV)
