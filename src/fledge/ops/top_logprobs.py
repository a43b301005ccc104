"""The best few of a softmax: what a drafter asks of its logits.

Legend: T rows, V vocabulary, K best.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels

_MOST_BEST = 64


class TopLogprobs(NamedTuple):
    logprobs_TK: Tensor
    """float32, falling; no numbers where the logits have some that are none."""

    indices_TK: Tensor


def top_logprobs(logits_TV: Tensor, num_best: int) -> TopLogprobs:
    """Log-probabilities of the most probable columns of each row."""

    def top_fused() -> TopLogprobs:
        from fledge.ops.top_logprobs_triton import top_columns

        with on_device(logits_TV):
            return TopLogprobs(*top_columns(logits_TV, num_best))

    def is_right(top: TopLogprobs) -> bool:
        # Of equal logits either may come first.
        wanted = _top_plain(logits_TV, num_best).logprobs_TK
        return torch.allclose(top.logprobs_TK, wanted, atol=1e-3, equal_nan=True)

    if num_best <= _MOST_BEST and uses_kernels(logits_TV):
        return run_kernel(
            "the best of logits",
            top_fused,
            lambda: _top_plain(logits_TV, num_best),
            kind=(logits_TV.dtype, logits_TV.shape[1], num_best),
            is_right=is_right,
        )
    return _top_plain(logits_TV, num_best)


def _top_plain(logits_TV: Tensor, num_best: int) -> TopLogprobs:
    top = logits_TV.float().log_softmax(dim=-1).topk(num_best, dim=-1)
    return TopLogprobs(top.values, top.indices)
