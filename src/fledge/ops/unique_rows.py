"""Taking rows of a tensor of which none is taken twice, so that gradients need no adding up."""

from typing import Any

import torch
from torch import Tensor


def take_rows(states: Tensor, rows_A: Tensor) -> Tensor:
    """Some rows, each at most once."""
    taken: Tensor = _TakeRows.apply(states, rows_A)  # type: ignore[no-untyped-call]
    return taken


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows_A: Tensor) -> Tensor:
        ctx.save_for_backward(rows_A)
        ctx.num_rows = states.shape[0]
        return states.index_select(0, rows_A)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows_A,), (grad,) = ctx.saved_tensors, grads
        whole = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        return whole.index_copy_(0, rows_A, grad), None
