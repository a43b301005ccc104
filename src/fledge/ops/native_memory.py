"""Memory for packed weights: few large pieces, in pages as large as the system gives.

A pass reads all weights once, from one end to the other. In pages of 4 KiB the processor looks up
an address for every few blocks, and guesses what comes next only up to the end of each page.
"""

import ctypes
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 1024 * 1024
_PIECE_BYTES = 16 * _HUGE_PAGE
_LINE = 64


class WeightMemory:
    """Hands out room that begins at a line of the cache, one place behind the other."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, values: Tensor) -> Tensor:
        """A copy of some bytes that lies here for as long as it is used."""
        count = values.numel()
        needed = -(-count // _LINE) * _LINE
        if self._used + needed > self._piece.numel():
            self._piece, self._used = _make_piece(max(needed, _PIECE_BYTES)), 0
        room = self._piece[self._used : self._used + count]
        self._used += needed
        room.copy_(values)
        return room


def _make_piece(count: int) -> Tensor:
    memory = torch.empty(count + _HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE_PAGE
    piece = memory[start : start + count]
    _ask_for_huge_pages(piece.data_ptr(), count // _HUGE_PAGE * _HUGE_PAGE)
    return piece


def _ask_for_huge_pages(address: int, count: int) -> None:
    """Only a wish: pages that nobody has touched yet become large ones where that is possible."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not count:
        return
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), ctypes.c_int(advice))
