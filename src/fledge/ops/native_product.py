"""Products by the native kernels, over weights packed to as few bits as they have.

Weights that were dequantised, or that a checkpoint holds in bfloat16, take 32 bits in memory and
have 4 to 16: the packer looks for a step and whole numbers that give back exactly the same floats
(`native/packing.h`), and where it finds none the floats stay as they are. A row of a product comes
out with the same bits however many rows are beside it.

Legend: T rows, N outputs, K inputs.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from math import prod

import torch
from torch import Tensor

from fledge.ops.native_library import NativeLibrary
from fledge.ops.native_memory import WeightMemory

_ROWS_OF_BLOCKS = 32
"""Rows that lie together: with wide registers two blocks, else four."""

_COLUMNS_OF_UNIT = 32


class Format(IntEnum):
    """How the rows of a piece lie in memory; the numbers are those of `native/products.h`."""

    FLOATS = 0
    FOUR_HALF = 1
    FOUR_FLOAT = 2
    EIGHT_HALF = 3
    EIGHT_FINE = 4
    BRAIN = 5


_UNIT_BYTES = {
    Format.FOUR_HALF: (512, 128),
    Format.FOUR_FLOAT: (512, 256),
    Format.EIGHT_HALF: (1024, 64),
    Format.EIGHT_FINE: (1024, 256),
    Format.BRAIN: (2048, 0),
}
"""Bytes of codes and of steps of 32 rows and 32 columns, the fewest first."""


class CPiece(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
    )


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("pieces", ctypes.POINTER(CPiece)),
        ("bias", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_pieces", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class NativeMatrix:
    """One matrix in pieces of rows, each in the format that suits it."""

    def __init__(
        self,
        library: NativeLibrary,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        sizes: Sequence[int] | None = None,
        rounded: Format | None = None,
        may_pack: bool = True,
        memory: WeightMemory | None = None,
        is_searched: bool = False,
    ) -> None:
        """`sizes` are the rows of each piece; `rounded` packs so even if other floats come back.

        Matrices that are read one after the other may share a `memory`. One that `is_searched` for
        its largest products knows how long its rows are, which rules most of them out.
        """
        self._library = library
        weight_NK = weight_NK.detach()
        assert weight_NK.dtype == torch.float32
        assert weight_NK.is_contiguous()
        self._bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        self._lengths_N: Tensor | None = None
        if is_searched and rounded is None:
            # A little longer than they are: squares may be too small for floats.
            self._lengths_N = weight_NK.norm(dim=1) + 1e-15
        pieces = torch.split(weight_NK, list(sizes or [len(weight_NK)]))
        forms = tuple(_UNIT_BYTES) if rounded is None else (rounded,)
        packed = [
            _pack(library, piece, forms if may_pack else (), rounded is not None)
            for piece in pieces
        ]
        if memory is not None:
            packed = [
                (form, codes, steps)
                if form is Format.FLOATS
                else (form, memory.keep(codes), memory.keep(steps))
                for form, codes, steps in packed
            ]
        self.formats = tuple(one[0] for one in packed)
        self._memory = [tensors for _, *tensors in packed]
        self._pieces = (CPiece * len(packed))(
            *(
                CPiece(form, len(piece), codes.data_ptr(), steps.data_ptr())
                for piece, (form, codes, steps) in zip(pieces, packed, strict=True)
            )
        )
        self.c = CMatrix(
            self._pieces,
            None if self._bias_N is None else self._bias_N.data_ptr(),
            None if self._lengths_N is None else self._lengths_N.data_ptr(),
            len(packed),
            *weight_NK.shape,
            0,
        )

    @property
    def packed_bytes(self) -> int:
        """Of the copies that packing made."""
        return sum(
            tensor.numel() * tensor.element_size()
            for form, tensors in zip(self.formats, self._memory, strict=True)
            if form is not Format.FLOATS
            for tensor in tensors
        )

    def best(self, rows_TK: Tensor) -> Tensor:
        """Of each row the output with the largest product, the first of equal ones; -1 if that is
        no number."""
        rows_TK = rows_TK.contiguous()
        best_T = torch.empty(rows_TK.shape[0], dtype=torch.long)
        self._library.best(
            ctypes.byref(self.c),
            rows_TK.data_ptr(),
            self.c.num_columns,
            len(best_T),
            best_T.data_ptr(),
            torch.get_num_threads(),
        )
        return best_T

    def __call__(self, rows_TK: Tensor) -> Tensor:
        rows_TK = rows_TK.contiguous()
        num_rows = rows_TK.shape[0]
        out_TN = rows_TK.new_empty(num_rows, self.c.num_rows)
        self._library.multiply(
            ctypes.byref(self.c),
            rows_TK.data_ptr(),
            self.c.num_columns,
            num_rows,
            out_TN.data_ptr(),
            self.c.num_rows,
            torch.get_num_threads(),
        )
        return out_TN


def _pack(
    library: NativeLibrary, rows_NK: Tensor, forms: Sequence[Format], may_round: bool
) -> tuple[Format, Tensor, Tensor]:
    """Format, codes and steps of the first given packing that gives back the same floats."""
    num_rows, num_columns = rows_NK.shape
    if num_columns % _COLUMNS_OF_UNIT == 0:
        for form in forms:
            # No room is made where the first rows cannot be packed so.
            if _try_format(library, rows_NK[:_ROWS_OF_BLOCKS], form, may_round) is None:
                continue
            packed = _try_format(library, rows_NK, form, may_round)
            if packed is not None:
                return form, *packed
    return Format.FLOATS, rows_NK, torch.empty(0, dtype=torch.uint8)


def _try_format(
    library: NativeLibrary, rows_NK: Tensor, form: Format, may_round: bool
) -> tuple[Tensor, Tensor] | None:
    num_rows, num_columns = rows_NK.shape
    num_units = -(-num_rows // _ROWS_OF_BLOCKS) * (num_columns // _COLUMNS_OF_UNIT)
    codes, steps = (_aligned_bytes(num_units * size) for size in _UNIT_BYTES[form])
    is_packed = library.pack(
        rows_NK.data_ptr(),
        num_rows,
        num_columns,
        form,
        int(may_round),
        codes.data_ptr(),
        steps.data_ptr(),
        torch.get_num_threads(),
    )
    return (codes, steps) if is_packed else None


def _aligned_bytes(count: int) -> Tensor:
    """Where loads of whole registers never cross two lines of the cache."""
    memory = torch.empty(count + 63, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + count]


def check_products(library: NativeLibrary) -> bool:
    """Whether products of a few shapes are what torch's are, in every format that can be made."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 64), (37, 96), (512, 96), (8, 19)):
        weight = torch.randn(shape, generator=generator)
        weights = [weight, weight.bfloat16().float()]
        if shape[1] % _COLUMNS_OF_UNIT == 0:
            weights.append((weight.view(-1, 32) * 3).round().clamp(-8, 7).view(shape) * 0.25)
            weights.append((weight.view(-1, 32) * 40).round().clamp(-127, 127).view(shape) * 0.25)
        for one in weights:
            matrix = NativeMatrix(library, one.contiguous(), is_searched=True)
            for num_rows in (1, 3, 7, 13):
                rows = torch.randn(num_rows, shape[1], generator=generator)
                found, wanted = matrix(rows), rows @ one.t()
                if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * prod(shape)):
                    return False
                if not matrix.best(rows).equal(found.argmax(dim=1)):
                    return False
    return True
