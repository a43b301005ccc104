"""How fast the device multiplies: what a plan's time is made of."""

import time

import torch

_SIZES = {"cpu": 1024, "cuda": 8192}
_PRODUCTS = 4


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product; takes a fraction of a second."""
    size = _SIZES[device.type]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    _multiply(matrix)  # the first product also sets things up
    started = time.perf_counter()
    for _ in range(_PRODUCTS):
        _multiply(matrix)
    return 2 * size**3 * _PRODUCTS / (time.perf_counter() - started)


def _multiply(matrix: torch.Tensor) -> None:
    product = matrix @ matrix
    if product.is_cuda:
        torch.cuda.synchronize(product.device)
