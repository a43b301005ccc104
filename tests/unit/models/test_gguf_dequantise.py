"""Unpacking GGUF tensors faster: the bits of the `gguf` package, which is as before afterwards."""

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from fledge.contracts.progress import SilentProgress
from fledge.models import gguf_dequantise
from fledge.models.gguf import convert_gguf
from fledge.models.gguf_dequantise import dequantise, fast_dequantising
from tests.unit.tiny_gguf import write_tiny_gguf

KINDS = [GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ2_XXS", "BF16")]


def packed(kind: GGMLQuantizationType, *shape: int) -> np.ndarray:
    """Bytes of which no scale is infinite or no number."""
    *rows, num_blocks = shape
    size = (*rows, num_blocks * GGML_QUANT_SIZES[kind][1])
    return np.random.default_rng(0).integers(0, 0x3C, size, dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3,), (70, 5), (2, 33, 1)])
def test_the_same_bits_as_the_package(kind, shape, monkeypatch):
    monkeypatch.setattr(gguf_dequantise, "_PIECE_VALUES", 1024)
    data = packed(kind, *shape)
    expected = dequantize(data, kind)
    found = dequantise(data, kind)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16])
def test_numbers_that_are_not_packed_stay(kind):
    data = np.arange(6, dtype=np.float32 if kind.name == "F32" else np.float16).reshape(2, 3)
    assert np.array_equal(dequantise(data, kind), np.arange(6).reshape(2, 3))


def test_half_a_block_is_refused_as_by_the_package():
    with pytest.raises(ValueError, match="not a multiple"):
        dequantise(packed(GGMLQuantizationType.Q8_0, 4)[:-1], GGMLQuantizationType.Q8_0)


def test_conversion_asks_for_it_and_the_package_is_as_before(tmp_path, monkeypatch):
    theirs = gguf.dequantize, gguf.get_tensor_name_map
    asked = []

    def watched(data, kind):
        asked.append(kind)
        return dequantise(data, kind)

    monkeypatch.setattr(gguf_dequantise, "dequantise", watched)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", progress=SilentProgress())
    assert GGMLQuantizationType.Q8_0 in asked
    assert theirs == (gguf.dequantize, gguf.get_tensor_name_map)
    with pytest.raises(KeyError), fast_dequantising():
        raise KeyError
    assert theirs == (gguf.dequantize, gguf.get_tensor_name_map)
