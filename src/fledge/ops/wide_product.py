"""Matrix products whose result is wider than their factors, not rounded in between on CUDA."""

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
    elif a.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b
