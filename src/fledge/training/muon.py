"""Muon: momentum whose steps have all directions of a matrix equally long.

The step of a matrix is its momentum with every singular value brought near 1 by a few products
(Newton and Schulz), times the root of its rows over its columns where it has more rows: what goes
in changes what comes out by as much in matrices of any size, so that one rate suits small heads and
large ones. Steps of equal length add up: without decay matrices grow, and later steps turn them
less and less. Nothing here waits for the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = "momentum"
_DECAY = 0.95
_ROUNDS = 5
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Of x, x^3, x^5: steep at 0, so that five rounds are enough for small singular values."""

_TINY = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values near 1, between about 0.7 and 1.2."""
    first, third, fifth = _POLYNOMIAL
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide: Tensor = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = wide.T if is_tall else wide
    wide = wide / wide.norm().clamp(min=_TINY)
    for _ in range(_ROUNDS):
        square = wide @ wide.T
        wide = first * wide + (third * square + fifth * square @ square) @ wide
    return (wide.T if is_tall else wide).to(matrix.dtype)


class Muon:
    """The momentum of some matrices."""

    def __init__(self, weights: Sequence[Tensor], weight_decay: float) -> None:
        self.weights = list(weights)
        self.momenta = [torch.zeros_like(one) for one in self.weights]
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float | Tensor, is_skipped: Tensor | None) -> None:
        """Use the gradients; where the flag on the device is 1, nothing is changed.

        A rate on the device is read there: captured steps have another one at every replay.
        """
        for weight, momentum in zip(self.weights, self.momenta, strict=True):
            if weight.grad is None:
                continue
            gradient, rate = weight.grad, torch.ones((), device=weight.device)
            if is_skipped is not None:
                rate = 1 - is_skipped
                gradient = torch.where(is_skipped > 0, momentum, gradient)
            momentum.lerp_(gradient, 1 - _DECAY)
            change = orthogonal(gradient.lerp(momentum, _DECAY))
            scale = learning_rate * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
            weight.mul_(1 - learning_rate * self._weight_decay * rate)
            weight.sub_(change * (scale * rate))
