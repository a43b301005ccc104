"""A mixture of experts: who works on a token, and what they make of it together.

Legend: T tokens, D hidden size, X experts, K experts of a token, S = T K, I width of an expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.gated import Activation, gated
from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.norms import is_close

_MOST_EXPERTS = 512
_MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-3}
"""In float32 the twin may compute in TF32."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of one layer's experts and of the router that chooses among them."""

    router_XD: Tensor
    gate_up_XJD: Tensor
    """Gates first: J = 2 I."""

    down_XDI: Tensor
    num_chosen: int
    is_normalised: bool
    """Weights of the chosen experts add up to one."""

    activation: Activation


def apply_experts(experts: Experts, rows_TD: Tensor) -> Tensor:
    """What the chosen experts make of each row, weighted."""
    weights_TK, chosen_TK = route(experts, rows_TD)
    num_rows, num_chosen = chosen_TK.shape
    ordered_S, order_S = chosen_TK.flatten().sort(stable=True)
    sorted_SD = rows_TD[order_S // num_chosen]
    # The end of each expert's rows, found on the device.
    numbers_X = torch.arange(experts.router_XD.shape[0], device=rows_TD.device)
    ends_X = torch.searchsorted(ordered_S, numbers_X, right=True).to(torch.int32)
    both_SJ = multiply_by_expert(sorted_SD, experts.gate_up_XJD, ends_X)
    active_SI = gated(both_SJ, experts.activation)
    made_SD = multiply_by_expert(active_SI, experts.down_XDI, ends_X)
    # Back to the order of the tokens; summing rows of experts by index would add in any order.
    out_SD = torch.empty_like(made_SD)
    out_SD[order_S] = made_SD
    return (out_SD.view(num_rows, num_chosen, -1) * weights_TK[..., None]).sum(dim=1)


def route(experts: Experts, rows_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the chosen experts of each row, [T, K]."""
    logits_TX = F.linear(rows_TD, experts.router_XD)
    top = logits_TX.float().softmax(dim=-1).topk(experts.num_chosen, dim=-1)
    weights_TK = top.values
    if experts.is_normalised:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TX.dtype), top.indices


def multiply_by_expert(rows_SK: Tensor, weights_XNK: Tensor, ends_X: Tensor) -> Tensor:
    """Each expert's rows, which lie together up to its end, times its own matrix [N, K]."""

    def multiply_plain() -> Tensor:
        out_SN = rows_SK.new_empty(rows_SK.shape[0], weights_XNK.shape[1])
        start = 0
        for expert, end in enumerate(ends_X.tolist()):
            if end > start:
                out_SN[start:end] = F.linear(rows_SK[start:end], weights_XNK[expert])
            start = end
        return out_SN

    is_fit = weights_XNK.is_contiguous() and weights_XNK.shape[0] <= _MOST_EXPERTS
    if not (uses_kernels(rows_SK) and is_fit and rows_SK.dtype in _MOST_DIFFERENCE):
        return multiply_plain()

    def multiply_fused() -> Tensor:
        from fledge.ops.experts_triton import multiply_grouped

        with on_device(rows_SK):
            return multiply_grouped(rows_SK, weights_XNK, ends_X)

    def is_right(found_SN: Tensor) -> bool:
        return is_close(found_SN, multiply_plain(), _MOST_DIFFERENCE[rows_SK.dtype])

    per_expert = rows_SK.shape[0] // weights_XNK.shape[0]
    kind = (rows_SK.dtype, weights_XNK.shape, min(64, per_expert).bit_length())
    name = "products of experts"
    return run_kernel(name, multiply_fused, multiply_plain, kind=kind, is_right=is_right)
