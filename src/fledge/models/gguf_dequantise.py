"""Makes transformers unpack GGUF tensors several times faster, to the same bits.

The `gguf` package unpacks sixteen rows at a time, so that most of its time goes into calling numpy,
and transformers builds the table of tensor names anew for every module. Inside `fast_dequantising`
both find functions that give them the same results.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_rows
from gguf.quants import quant_shape_from_byte_shape
from numpy.typing import NDArray

_PIECE_VALUES = 1 << 17
"""Values unpacked at once: enough for numpy to be busy, few enough to stay in a core's cache."""

_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)


@contextmanager
def fast_dequantising() -> Iterator[None]:
    """Inside, whoever asks the `gguf` package for these two gets ours."""
    theirs = gguf.dequantize, gguf.get_tensor_name_map
    gguf.dequantize, gguf.get_tensor_name_map = dequantise, cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.dequantize, gguf.get_tensor_name_map = theirs


def dequantise(data: NDArray[np.generic], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """A tensor's values, with as many threads as torch computes with."""
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    if kind in _PLAIN or data.shape[-1] % block_bytes:
        plain: NDArray[np.float32] = dequantize_rows(data, kind)
        return plain
    # Slicing an array that is mapped from a file costs far more than slicing a plain one.
    blocks = np.asarray(data).reshape(-1, block_bytes)
    values = np.empty((len(blocks), block_len), dtype=np.float32)

    def fill(start: int, stop: int) -> None:
        # As one long row, whatever the tensor's rows are: blocks do not know of each other.
        row = dequantize_rows(blocks[start:stop].reshape(1, -1), kind)
        values[start:stop] = row.reshape(-1, block_len)

    borders = [*range(0, len(blocks), max(1, _PIECE_VALUES // block_len)), len(blocks)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for done in [threads.submit(fill, *piece) for piece in pairwise(borders)]:
            done.result()
    return values.reshape(quant_shape_from_byte_shape(data.shape, kind))
