"""The kernels of `soft_target_chunks`: a row of logits is read twice, and its gradient written.

The first kernel takes a row of the target: log-sum-exp and entropy. The second takes a pair of such
a row and a draft step: log-sum-exp, best token, loss, sum of min(p, q), gradient.

Legend: C rows of the target, K draft steps, P = C x K pairs, V draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.contracts.train_settings import LossKind
from fledge.ops.soft_target_chunks import Chunk, Compared
from fledge.ops.soft_targets import BLEND_RATE, TINY

_MAX_BLOCK = 4096
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _target_kernel(target_ptr, lse_ptr, entropy_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = _NOTHING
    total = 0.0
    weighted = 0.0
    for start in range(0, VOCAB, BLOCK):
        at = start + lane
        logits = tl.load(target_ptr + row * VOCAB + at, at < VOCAB, _NOTHING)
        higher = tl.maximum(top, tl.max(logits, axis=0))
        # Until a token with any probability was seen there is nothing to subtract.
        base = tl.where(higher == _NOTHING, 0.0, higher)
        parts = tl.exp(logits - base)
        shrunk = tl.exp(top - base)
        finite = tl.where(logits == _NOTHING, 0.0, logits)
        total = total * shrunk + tl.sum(parts, axis=0)
        weighted = weighted * shrunk + tl.sum(parts * finite, axis=0)
        top = higher
    lse = top + tl.log(total)
    tl.store(lse_ptr + row, lse)
    tl.store(entropy_ptr + row, lse - weighted / total)


@triton.jit
def _probabilities(logits_ptr, row, at, lse, VOCAB: tl.constexpr):
    return tl.exp(tl.load(logits_ptr + row * VOCAB + at, at < VOCAB, _NOTHING) - lse)


@triton.jit
def _pair_kernel(
    target_ptr,
    draft_ptr,
    target_lse_ptr,
    greedy_ptr,
    mass_ptr,
    weight_ptr,
    loss_ptr,
    correct_ptr,
    accepted_ptr,
    slope_ptr,
    tiny,
    blend_rate,
    NUM_STEPS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ACCEPTANCE: tl.constexpr,
    IS_BLEND: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row = pair // NUM_STEPS
    lane = tl.arange(0, BLOCK)
    target_lse = tl.load(target_lse_ptr + row)
    mass = tl.load(mass_ptr + row)
    weight = tl.load(weight_ptr + pair)
    top = _NOTHING
    best = 0
    total = 0.0
    expected = 0.0
    for start in range(0, VOCAB, BLOCK):
        at = start + lane
        logits = tl.load(draft_ptr + pair * VOCAB + at, at < VOCAB, _NOTHING)
        target = tl.load(target_ptr + row * VOCAB + at, at < VOCAB, _NOTHING)
        highest = tl.max(logits, axis=0)
        here = tl.min(tl.where(logits == highest, at, VOCAB), axis=0)
        best = tl.where(highest > top, here, best)
        higher = tl.maximum(top, highest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher), axis=0)
        top = higher
        finite = tl.where(at < VOCAB, logits, 0.0)
        expected += tl.sum(tl.exp(target - target_lse) * finite, axis=0)
    lse = top + tl.log(total)
    accepted = 0.0
    below = 0.0
    for start in range(0, VOCAB, BLOCK):
        at = start + lane
        q = _probabilities(draft_ptr, pair, at, lse, VOCAB)
        p = _probabilities(target_ptr, row, at, target_lse, VOCAB)
        accepted += tl.sum(tl.minimum(q, p * mass), axis=0)
        if IS_ACCEPTANCE or IS_BLEND:
            below += tl.sum(tl.where(q < p * mass, q, 0.0), axis=0)
        elif HAS_SLOPE:
            slope = (q - p) * weight
            place = slope_ptr + pair * VOCAB + at
            tl.store(place, slope.to(slope_ptr.dtype.element_ty), at < VOCAB)
    loss = lse - expected
    toward_p = 0.0
    toward_kept = 0.0
    if IS_ACCEPTANCE:
        loss = -tl.log(tl.maximum(accepted, tiny))
        toward_kept = tl.where(accepted > tiny, weight / tl.maximum(accepted, tiny), 0.0)
    if IS_BLEND:
        share = tl.exp(-blend_rate * accepted)
        loss = share * loss + (1.0 - share) * (1.0 - accepted)
        toward_p = share * weight
        toward_kept = weight - toward_p
    if (IS_ACCEPTANCE or IS_BLEND) and HAS_SLOPE:
        for start in range(0, VOCAB, BLOCK):
            at = start + lane
            q = _probabilities(draft_ptr, pair, at, lse, VOCAB)
            p = _probabilities(target_ptr, row, at, target_lse, VOCAB)
            is_below = tl.where(q < p * mass, 1.0, 0.0)
            slope = q * (below - is_below) * toward_kept + (q - p) * toward_p
            place = slope_ptr + pair * VOCAB + at
            tl.store(place, slope.to(slope_ptr.dtype.element_ty), at < VOCAB)
    tl.store(loss_ptr + pair, loss)
    tl.store(correct_ptr + pair, best == tl.load(greedy_ptr + row))
    tl.store(accepted_ptr + pair, accepted)


def compare_rows_fused(
    target_CV: Tensor,
    draft_PV: Tensor,
    chunk: Chunk,
    kind: LossKind,
    slope_dtype: torch.dtype | None,
) -> Compared:
    """`soft_target_chunks.compare_rows_plain` in two kernels, for float32 logits."""
    num_rows, num_steps = chunk.weights_CK.shape
    vocab_size, device = draft_PV.shape[1], draft_PV.device
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab_size))
    target_CV, draft_PV = target_CV.contiguous(), draft_PV.contiguous()
    lse_C, entropy_C = torch.empty((2, num_rows), device=device).unbind()
    loss_CK, accepted_CK = torch.empty((2, num_rows, num_steps), device=device).unbind()
    correct_CK = torch.empty((num_rows, num_steps), dtype=torch.bool, device=device)
    slope_PV = None if slope_dtype is None else torch.empty_like(draft_PV, dtype=slope_dtype)
    if num_rows:
        _target_kernel[(num_rows,)](
            target_CV, lse_C, entropy_C, VOCAB=vocab_size, BLOCK=block, num_warps=8
        )
        _pair_kernel[(num_rows * num_steps,)](
            target_CV,
            draft_PV,
            lse_C,
            chunk.greedy_C,
            chunk.mass_C,
            chunk.weights_CK.contiguous(),
            loss_CK,
            correct_CK,
            accepted_CK,
            draft_PV if slope_PV is None else slope_PV,
            TINY,
            BLEND_RATE,
            NUM_STEPS=num_steps,
            VOCAB=vocab_size,
            BLOCK=block,
            IS_ACCEPTANCE=kind == "acceptance",
            IS_BLEND=kind == "blend",
            HAS_SLOPE=slope_PV is not None,
            num_warps=8,
        )
    return Compared(loss_CK, correct_CK, accepted_CK, entropy_C, slope_PV)
