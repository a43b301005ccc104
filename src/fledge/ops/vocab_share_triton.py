"""The kernel of `vocab_share`: one program reads one row of logits once.

Legend: P rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 4096
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _weigh_kernel(
    logits_ptr,
    is_part_ptr,
    greedy_ptr,
    log_part_ptr,
    log_share_ptr,
    vocab_size,
    sharpness,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = _NOTHING
    part_top = _NOTHING
    best = 0
    total = 0.0
    part_total = 0.0
    for start in range(0, vocab_size, BLOCK):
        at = start + lane
        logits = tl.load(logits_ptr + row * vocab_size + at, at < vocab_size, _NOTHING)
        logits = logits.to(tl.float32)
        is_part = tl.load(is_part_ptr + at, at < vocab_size, 0) != 0
        highest = tl.max(logits, axis=0)
        here = tl.min(tl.where(logits == highest, at, vocab_size), axis=0)
        best = tl.where(highest > top, here, best)
        higher = tl.maximum(top, highest)
        # Until a token with any probability was seen there is nothing to subtract.
        base = tl.where(higher == _NOTHING, 0.0, higher)
        shrunk = tl.exp((top - base) * sharpness)
        total = total * shrunk + tl.sum(tl.exp((logits - base) * sharpness), axis=0)
        top = higher
        part = tl.where(is_part, logits, _NOTHING)
        part_higher = tl.maximum(part_top, tl.max(part, axis=0))
        part_base = tl.where(part_higher == _NOTHING, 0.0, part_higher)
        part_shrunk = tl.exp((part_top - part_base) * sharpness)
        part_total = part_total * part_shrunk + tl.sum(
            tl.exp((part - part_base) * sharpness), axis=0
        )
        part_top = part_higher
    # The two tops are often the same, and their difference is then exactly nothing.
    log_share = (part_top - top) * sharpness + tl.log(part_total / total)
    tl.store(greedy_ptr + row, best)
    tl.store(log_part_ptr + row, part_top * sharpness + tl.log(part_total))
    tl.store(log_share_ptr + row, tl.where(log_share > 0.0, 0.0, log_share))


def weigh_part_fused(
    logits_PV: Tensor, is_part_V: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy tokens, logs of the part's sum and of its share of all probability."""
    num_rows, vocab_size = logits_PV.shape
    device = logits_PV.device
    greedy_P = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_part_P, log_share_P = torch.empty((2, num_rows), device=device).unbind()
    _weigh_kernel[(num_rows,)](
        logits_PV.contiguous(),
        is_part_V.view(torch.uint8),
        greedy_P,
        log_part_P,
        log_share_P,
        vocab_size,
        1 / temperature,
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return greedy_P, log_part_P, log_share_P
