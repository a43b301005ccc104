"""Matrix products whose result is wider than their factors, not rounded in between on CUDA."""

from functools import cache

import torch
from torch import Tensor


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A product in float32, or wider where the factors are."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product to a sum that may be wider than its factors."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32 and _can_add_wider(a.dtype, a.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += wide_product(a, b)


@cache
def _can_add_wider(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch adds a product to a wider sum in one go; older ones refuse."""
    factor = torch.zeros((16, 16), dtype=dtype, device=device)
    total = torch.zeros((16, 16), device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
