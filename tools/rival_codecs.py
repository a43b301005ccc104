"""Other ways to round hidden states, for `measure_codec.py` to compare the codec with."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fledge.features.channel_spread import channels_of
from fledge.ops.codec_tables import Tables
from fledge.ops.feature_codec import dequantise, quantise

Rounding = Callable[[Tensor], Tensor]


def fp8_per_token(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def int8_per_token(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / scale).round() * scale


def by_tap(rounding: Rounding, hidden_size: int) -> Rounding:
    return lambda rows: torch.cat([rounding(tap) for tap in torch.split(rows, hidden_size, 1)], 1)


def lloyd_max(bits: int) -> tuple[Tensor, Tensor]:
    """Thresholds and levels with the least mean square error on a Gaussian, by iteration."""
    edges = [NormalDist(sigma=math.sqrt(3)).inv_cdf(i / 2**bits) for i in range(1, 2**bits)]
    for _ in range(4000):
        levels = cell_means(edges)
        edges = [(low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)]
    return torch.tensor(edges), torch.tensor(cell_means(edges))


def uniform(bits: int) -> tuple[Tensor, Tensor]:
    """The same with thresholds at equal distances, the best distance of many."""

    def loss(step: float) -> float:
        edges = [(i - 2 ** (bits - 1)) * step for i in range(1, 2**bits)]
        return 1 - sum(m * m * p for m, p in zip(cell_means(edges), masses(edges), strict=True))

    step = min((2 * size / 2**bits for size in np.linspace(1.5, 5, 141)), key=loss)
    edges = [(i - 2 ** (bits - 1)) * step for i in range(1, 2**bits)]
    return torch.tensor(edges), torch.tensor(cell_means(edges))


def masses(edges: list[float]) -> list[float]:
    gauss = NormalDist()
    ends = [-math.inf, *edges, math.inf]
    # From the nearer tail, where doubles are finer.
    return [
        gauss.cdf(-low) - gauss.cdf(-high) if low >= 0 else gauss.cdf(high) - gauss.cdf(low)
        for low, high in zip(ends, ends[1:], strict=False)
    ]


def cell_means(edges: list[float]) -> list[float]:
    gauss = NormalDist()
    ends = [-math.inf, *edges, math.inf]
    pairs = zip(ends, ends[1:], masses(edges), strict=False)
    return [(gauss.pdf(low) - gauss.pdf(high)) / mass for low, high, mass in pairs]


def with_tables(tables: Tables, fitted: Tensor | None) -> Rounding:
    """The codec's own steps with other tables; in units of the channels' spread where given."""

    def rounding(rows: Tensor) -> Tensor:
        center, spread = torch.zeros(1), torch.ones(1)
        if fitted is not None:
            found = channels_of(fitted)
            center, spread = torch.from_numpy(found.center), torch.from_numpy(found.spread)
        blocks = ((rows - center) / spread).reshape(-1, tables.hadamard_KK.shape[0])
        codes, scales = quantise(blocks, tables)
        decoded = dequantise(codes, scales, tables, torch.float32)
        return decoded.reshape(rows.shape) * spread + center

    return rounding
