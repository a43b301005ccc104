"""The tables of the feature codec: the rotation of a block, and the levels that values round to.

They follow from the rules below, so that anybody can make them again.

Legend: K values of a block.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.contracts.feature_formats import MAX_BLOCK, MIN_BLOCK

SIGN_BITS = 0x243F6A8885A308D313198A2E03707344
"""The first 128 binary digits of pi behind the point: signs that nobody chose."""


def rotation_matrix(block: int) -> Tensor:
    """The orthogonal matrix R [K, K], float32: a block x is stored as x @ R.T and decoded by @ R.

    R[i, j] = s(j) * (-1)**popcount(i & j) / sqrt(K), a Hadamard matrix with signs; s(j) is -1 where
    binary digit j of pi behind the point is 1 (`SIGN_BITS`, its highest bit is digit 0).
    """
    return _signed_hadamard(block) / math.sqrt(block)


def centroids(bits: int) -> Tensor:
    """The values that codes stand for, float32, ascending: the mean of a Gaussian in each cell."""
    gauss = NormalDist()
    edges = [-math.inf, *thresholds(bits).tolist(), math.inf]
    means = []
    for low, high in zip(edges, edges[1:], strict=False):
        # Far out the two tails differ by less than a double can tell: count from the near end.
        near, far = (low, high) if low >= 0 else (-high, -low)
        mass = gauss.cdf(-near) - gauss.cdf(-far)
        mean = (gauss.pdf(near) - gauss.pdf(far)) / mass
        means.append(mean if low >= 0 else -mean)
    return torch.tensor(means, dtype=torch.float32)


def thresholds(bits: int) -> Tensor:
    """Where one code ends and the next begins, float32 [2**bits - 1].

    They cut a Gaussian of variance 3 into equally probable cells: the density of levels that is
    best for one of variance 1 when there are many.
    """
    wide = NormalDist(sigma=math.sqrt(3))
    return torch.tensor([wide.inv_cdf(i / 2**bits) for i in range(1, 2**bits)], dtype=torch.float32)


class Tables(NamedTuple):
    """Of one codec on one device."""

    hadamard_KK: Tensor
    thresholds: Tensor
    centroids: Tensor


def _signed_hadamard(block: int) -> Tensor:
    assert MIN_BLOCK <= block <= MAX_BLOCK
    rows = torch.ones(1, 1)
    while len(rows) < block:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    digits = f"{SIGN_BITS:0{MAX_BLOCK}b}"[:block]
    return rows * torch.tensor([-1.0 if digit == "1" else 1.0 for digit in digits])


def tables_on(bits: int, block: int, device: torch.device) -> Tables:
    """All of them for one format."""
    tables = (_signed_hadamard(block), thresholds(bits), centroids(bits))
    return Tables(*(table.to(device) for table in tables))
