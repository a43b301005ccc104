"""A mixture of experts: who works on a token, and what they make of it together.

Legend: T tokens, D hidden size, X experts, K experts of a token, S = T K, I width of an expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.gated import Activation, gated

_GROUPED_DTYPES = (torch.bfloat16,)


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
    both_SJ = _grouped(sorted_SD, experts.gate_up_XJD, ends_X)
    made_SD = _grouped(gated(both_SJ, experts.activation), experts.down_XDI, ends_X)
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


def _grouped(rows_SK: Tensor, weights_XNK: Tensor, ends_X: Tensor) -> Tensor:
    """Each expert's rows, which lie together, times its own matrix."""
    if rows_SK.is_cuda and rows_SK.dtype in _GROUPED_DTYPES:
        out_SN: Tensor = F.grouped_mm(rows_SK, weights_XNK.transpose(1, 2), offs=ends_X)
        return out_SN
    out_SN = rows_SK.new_empty(rows_SK.shape[0], weights_XNK.shape[1])
    start = 0
    for expert, end in enumerate(ends_X.tolist()):
        if end > start:
            out_SN[start:end] = F.linear(rows_SK[start:end], weights_XNK[expert])
        start = end
    return out_SN
