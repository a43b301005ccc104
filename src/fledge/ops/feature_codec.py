"""Hidden states as few bytes: exact, or rotated, scaled by block and rounded to 8, 6, 5 or 4 bits.

Each channel is first put in units of its own spread, where `Channels` are given: real targets have
channels a thousand times larger than others, and every one of them should lose the same share. A
tap's H values are then cut into blocks. Each block is rotated by a fixed orthogonal matrix, so that
what is still large is spread over all of it and the whole looks Gaussian; it is divided by its root
mean square; and each value is rounded to one of 2**bits levels made for a Gaussian.

    row            values of tap 0 | zeros up to whole blocks | values of tap 1 | ...
    "codes"        uint8, `bit_planes.pack` over all blocks of the row
    "scales"       float16, one a block: the square root of the block's root mean square, so that
                   float16 reaches from 4e-15 to 4e9
    decoded block  scale**2 * centroids(bits)[codes] @ rotation_matrix(block)
    decoded row    center + spread * (its blocks without the zeros)

A row's bytes do not depend on the rows beside it, nor on the device: the rotation adds and
subtracts whole numbers small enough for float32 to be exact in any order.

Legend: T rows, N values of a row, G blocks of a row, K values of a block, B bytes of a row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.errors import ArtifactError
from fledge.contracts.feature_formats import FORMAT_BITS, block_size, padded_size
from fledge.ops import bit_planes
from fledge.ops.codec_tables import Tables, tables_on
from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.store.channels import Channels

_GRID_BITS = 16
"""Values become whole numbers below 2**16; 128 of them add up to less than 2**24, float32's last
exact whole number. Their error is below a fiftieth of that of 8 bits even when one value holds
everything."""

_EXPONENT_MASK = 0x7F800000
"""The bits of a float32 that say which power of two it begins with."""

_LEAST_POWER = 2.0**-100
"""Blocks below it become zeros."""

_CHECKED_ROWS = 256
"""Of the first that a kernel codes."""


class Codec(ABC):
    """Rows of one width to named arrays and back."""

    def __init__(self, name: FeatureFormat, width: int):
        self.name = name
        self.width = width

    @property
    @abstractmethod
    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """What a row is stored as: the arrays' names, types and columns."""

    @property
    def bytes_per_row(self) -> int:
        return sum(dtype.itemsize * columns for dtype, columns in self.parts.values())

    @abstractmethod
    def encode(self, rows_TN: Tensor) -> dict[str, Tensor]:
        """The parts, on the rows' device; never waits for it, so `check_finite` comes later."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The rows, on the parts' device; in bfloat16 with products of bfloat16."""

    @abstractmethod
    def is_finite_T(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Which rows had only numbers that can be stored."""

    def check_finite(self, parts: Mapping[str, Tensor], what: str = "the features") -> None:
        """Refuse rows with infinity, NaN or sizes beyond the format."""
        bad = (~self.is_finite_T(parts)).nonzero()
        if len(bad):
            raise ArtifactError(
                f"row {int(bad[0])} of {what} holds infinity, NaN or values beyond 4e9, and so do "
                f"{len(bad) - 1} others: the target overflowed. Load it in bfloat16 or float32."
            )


class ExactCodec(Codec):
    """Rows as they are."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__("exact", width)
        self.dtype = dtype

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        return {"values": (self.dtype, self.width)}

    def encode(self, rows_TN: Tensor) -> dict[str, Tensor]:
        assert rows_TN.shape[1] == self.width
        return {"values": rows_TN.to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["values"].to(dtype)

    def is_finite_T(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["values"].isfinite().all(dim=1)


class _Units(NamedTuple):
    """Channels on one device."""

    center_N: Tensor
    spread_N: Tensor
    inverse_N: Tensor
    """What is multiplied with instead of dividing by the spread."""


class _Constants(NamedTuple):
    """What a codec needs on one device."""

    tables: Tables
    units: _Units | None


class RotatedCodec(Codec):
    """Rotated blocks, one scale each, a few bits a value."""

    def __init__(
        self,
        name: FeatureFormat,
        *,
        hidden_size: int,
        num_taps: int,
        channels: Channels | None = None,
    ):
        super().__init__(name, num_taps * hidden_size)
        assert channels is None or len(channels) == self.width
        self._channels = channels
        self._constants: dict[torch.device, _Constants] = {}
        self.bits = FORMAT_BITS[name]
        self.hidden_size = hidden_size
        self.num_taps = num_taps
        self.block = block_size(hidden_size)
        self.padded_size = padded_size(hidden_size)
        """Values of one tap, with the zeros that fill its last block."""

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        num_values = self.num_taps * self.padded_size
        return {
            "codes": (torch.uint8, bit_planes.packed_bytes(num_values, self.bits)),
            "scales": (torch.float16, num_values // self.block),
        }

    def encode(self, rows_TN: Tensor) -> dict[str, Tensor]:
        assert rows_TN.shape[1] == self.width
        codes_TN, scales_TG = self._quantised(rows_TN)
        return {"codes": bit_planes.pack(codes_TN, self.bits), "scales": scales_TG}

    def _quantised(self, rows_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales, by a kernel on CUDA."""

        def fused() -> tuple[Tensor, Tensor]:
            from fledge.ops.feature_codec_triton import quantise_rows_fused

            units, tables = self._on(rows_TN.device).units, self._on(rows_TN.device).tables
            with on_device(rows_TN):
                return quantise_rows_fused(
                    rows_TN.contiguous(),
                    None if units is None else (units.center_N, units.inverse_N),
                    tables.hadamard_KK,
                    tables.thresholds,
                    hidden_size=self.hidden_size,
                    padded_size=self.padded_size,
                    bits=self.bits,
                )

        def is_right(found: tuple[Tensor, Tensor]) -> bool:
            plain = self._quantised_plain(rows_TN[:_CHECKED_ROWS])
            return all(
                torch.equal(ours[:_CHECKED_ROWS].view(torch.uint8), theirs.view(torch.uint8))
                for ours, theirs in zip(found, plain, strict=True)
            )

        if uses_kernels(rows_TN) and len(rows_TN):
            kind = (self.bits, self.hidden_size, self.num_taps, rows_TN.dtype)
            return run_kernel(
                "coding features",
                fused,
                lambda: self._quantised_plain(rows_TN),
                kind=kind,
                is_right=is_right,
            )
        return self._quantised_plain(rows_TN)

    def _quantised_plain(self, rows_TN: Tensor) -> tuple[Tensor, Tensor]:
        constants = self._on(rows_TN.device)
        if constants.units is not None:
            rows_TN = (rows_TN.float() - constants.units.center_N) * constants.units.inverse_N
        codes_GK, scales_G = quantise(self._blocks(rows_TN), constants.tables)
        codes_TN = codes_GK.view(len(rows_TN), self.num_taps * self.padded_size)
        return codes_TN, scales_G.view(len(rows_TN), codes_TN.shape[1] // self.block)

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes_TB, scales_TG = parts["codes"], parts["scales"]
        constants = self._on(codes_TB.device)
        codes_TN = bit_planes.unpack(codes_TB, self.bits, self.num_taps * self.padded_size)
        product_dtype = dtype if dtype is torch.bfloat16 else torch.float32
        values_GK = dequantise(
            codes_TN.view(-1, self.block), scales_TG.reshape(-1), constants.tables, product_dtype
        )
        padded = values_GK.view(len(codes_TB), self.num_taps, self.padded_size)
        rows_TN = padded[..., : self.hidden_size].reshape(len(codes_TB), self.width)
        if constants.units is not None:
            units = constants.units
            rows_TN = torch.addcmul(units.center_N, rows_TN.float(), units.spread_N)
        return rows_TN.to(dtype)

    def is_finite_T(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["scales"].isfinite().all(dim=1)

    def _on(self, device: torch.device) -> "_Constants":
        if device not in self._constants:
            units = None if self._channels is None else _units_on(self._channels, device)
            self._constants[device] = _Constants(tables_on(self.bits, self.block, device), units)
        return self._constants[device]

    def _blocks(self, rows_TN: Tensor) -> Tensor:
        missing = self.padded_size - self.hidden_size
        if missing:
            taps = rows_TN.reshape(len(rows_TN), self.num_taps, self.hidden_size)
            rows_TN = torch.nn.functional.pad(taps, (0, missing))
        return rows_TN.reshape(-1, self.block)


def make_codec(
    name: FeatureFormat,
    *,
    hidden_size: int,
    num_taps: int,
    dtype: torch.dtype,
    channels: Channels | None = None,
) -> Codec:
    """The codec of a format for `num_taps` hidden states side by side; `dtype` is the target's."""
    if name == "exact":
        return ExactCodec(num_taps * hidden_size, dtype)
    return RotatedCodec(name, hidden_size=hidden_size, num_taps=num_taps, channels=channels)


def quantise(blocks_GK: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Codes uint8 [G, K] and scales float16 [G]; scales are NaN where something is not finite."""
    block = blocks_GK.shape[1]
    exact_GK = blocks_GK.float()
    largest_G = torch.linalg.vector_norm(exact_GK, ord=math.inf, dim=1)
    # Powers of two by their bits: multiplying by them is exact, and pow may not be.
    power_G = (largest_G.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    step_G = power_G.clamp_min(_LEAST_POWER) * 2.0 ** (1 - _GRID_BITS)
    whole_GK = (exact_GK * (1 / step_G)[:, None]).round()
    rotated_GK = whole_GK @ tables.hadamard_KK.T

    # In float64 the sum of squares of whole numbers is exact too.
    norm_G = torch.linalg.vector_norm(rotated_GK, dim=1, dtype=torch.float64)
    roots_G = (norm_G / block * step_G).sqrt()
    scales_G = torch.where(largest_G.isfinite(), roots_G, math.nan).half()
    divisor_G = scales_G.float().square() * math.sqrt(block) / step_G
    unit_GK = rotated_GK * torch.where(divisor_G > 0, 1 / divisor_G, 0)[:, None]
    codes_GK = torch.bucketize(unit_GK, tables.thresholds, out_int32=True, right=True)
    return codes_GK.to(torch.uint8), scales_G


def dequantise(
    codes_GK: Tensor, scales_G: Tensor, tables: Tables, product_dtype: torch.dtype
) -> Tensor:
    """Values [G, K] of what `quantise` returned."""
    factor_G = scales_G.float().square() / math.sqrt(codes_GK.shape[1])
    rotated_GK = tables.centroids[codes_GK.int()] * factor_G[:, None]
    return rotated_GK.to(product_dtype) @ tables.hadamard_KK.to(product_dtype)


def _units_on(channels: Channels, device: torch.device) -> _Units:
    center_N, spread_N = (torch.from_numpy(p.copy()) for p in (channels.center, channels.spread))
    # Divided on the CPU, so that every device has the same.
    return _Units(center_N.to(device), spread_N.to(device), (1 / spread_N).to(device))
