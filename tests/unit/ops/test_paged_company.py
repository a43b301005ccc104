"""A row's attention has the same bits whatever rows are beside it, in Triton's interpreter.

Decoding token by token, verifying a chain of drafts and reading a chunk say the same of a token.
Contexts end just before, at and behind the border of a segment; tiles of all sizes; keys that one
program reads, and keys split over several.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fledge.ops.attention import AttentionSpec
from fledge.ops.paged_rows import PagedRows
from fledge.ops.paged_shape import (
    SEGMENTS_OF_A_LENGTH,
    PagedShape,
    num_segments,
    paged_shape,
)
from tests.paged_cases import Heads
from tests.paged_company import Company, Request

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = triton.language
paged_attention_triton = pytest.importorskip("fledge.ops.paged_attention_triton")
segments_triton = pytest.importorskip("fledge.ops.paged_segments_triton")
segment_border, split_range = segments_triton.segment_border, segments_triton.split_range
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
HEADS, NUM_ROWS, SEGMENT = Heads(3, 1, 16), 4, 64
SPECS = {
    "plain": AttentionSpec(0.25),
    "window": AttentionSpec(0.25, window=40),
    "soft cap and sinks": AttentionSpec(
        0.25, soft_cap=3.0, sinks_H=torch.linspace(-1.0, 2.0, HEADS.query)
    ),
}


@pytest.fixture
def told() -> Iterator[dict[str, int]]:
    """Short segments; how many programs share a tile and who joins its parts as a test says it."""
    told = {"segment": SEGMENT}

    def shaped(rows: PagedRows, **sizes: Any) -> PagedShape:
        capacity = rows.table_BP.shape[1] * rows.block_size
        num_parts = num_segments(capacity, SEGMENT)
        return replace(paged_shape(rows, **sizes), num_parts=num_parts, **told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention_triton, "paged_shape", shaped)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_of_any_company)
        yield told


def _dot_of_any_company(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """numpy's product orders the sums of a row by how many rows there are, on some processors.

    A GPU does not, so neither may what stands for it here: in float64 the order rounds away.
    """
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


@pytest.mark.parametrize(
    ("name", "context", "dtype"),
    [
        ("plain", SEGMENT - 2, torch.float16),
        ("plain", 2 * SEGMENT + 20, torch.float32),
        ("window", SEGMENT - 2, torch.float32),
        ("window", 2 * SEGMENT + 20, torch.float16),
        ("soft cap and sinks", 2 * SEGMENT - 1, torch.float16),
    ],
)
def test_company_changes_no_bits(
    name: str, context: int, dtype: torch.dtype, told: dict[str, int]
) -> None:
    request = Request(HEADS, context + 12, SPECS[name], torch.empty(0, dtype=dtype))
    told["num_splits"] = 1
    alone = request.attend_alone(context, NUM_ROWS)
    for num_splits, company in [
        (3, Company(1, 1)),
        (1, Company(2, NUM_ROWS)),
        (2, Company(1, NUM_ROWS)),
        (1, Company(1, 12, is_chunk=True)),
    ]:
        told |= {"num_splits": num_splits, "joins": True, "is_parted": False}
        count = min(company.rows, NUM_ROWS)
        for found in request.attend(context, company):
            assert torch.equal(found[:count], alone[:count]), (str(company), num_splits)


@pytest.mark.parametrize(
    ("name", "context", "dtype"),
    [
        ("plain", 3 * SEGMENT - 2, torch.float16),
        ("window", 2 * SEGMENT + 20, torch.float32),
        ("soft cap and sinks", SEGMENT - 2, torch.float32),
    ],
)
def test_a_second_kernel_joins_the_same_bits(
    name: str, context: int, dtype: torch.dtype, told: dict[str, int]
) -> None:
    """Also where some tiles lie within one segment, and keys that all see have a loop."""
    request = Request(HEADS, context + 12, SPECS[name], torch.empty(0, dtype=dtype))
    told["num_splits"] = 1
    alone = request.attend_alone(context, NUM_ROWS)
    told |= {"num_splits": 3, "joins": False, "is_parted": True}
    for company in (Company(2, NUM_ROWS), Company(1, 12, is_chunk=True)):
        for found in request.attend(context, company):
            assert torch.equal(found[:NUM_ROWS], alone), str(company)


def test_a_window_inside_one_long_segment_is_one_programs(told: dict[str, int]) -> None:
    """Segments are longer far on: programs that share a tile by its length may have no keys."""
    context, spec = SEGMENTS_OF_A_LENGTH * SEGMENT + 110, AttentionSpec(0.25, window=100)
    request = Request(HEADS, context + 12, spec, torch.empty(0))
    told["num_splits"] = 1
    alone = request.attend_alone(context, 1)
    for joins in (True, False):
        told |= {"num_splits": 3, "joins": joins}
        (found,) = request.attend(context, Company(1, 1))
        assert torch.equal(found, alone)
        assert found.abs().max() > 0


def test_host_and_device_count_segments_alike() -> None:
    """Each has a part, and there is memory for no more."""
    longer = SEGMENTS_OF_A_LENGTH * SEGMENT
    numbers = [1, SEGMENT, SEGMENT + 1, longer, longer + 1, 131_071, 131_073]
    found_2B = torch.zeros(2, len(numbers), dtype=torch.int32)
    numbers_B = torch.tensor(numbers, dtype=torch.int32)
    triton.jit(_store_border)[(len(numbers),)](numbers_B, *found_2B, SEGMENT=SEGMENT)
    borders, indices = found_2B.tolist()
    assert indices == [num_segments(number, SEGMENT) for number in numbers]
    far_on = 2 * 131_072 // SEGMENTS_OF_A_LENGTH
    first = [SEGMENT, SEGMENT, 2 * SEGMENT, longer, longer + 2 * SEGMENT]
    assert borders == [*first, 131_072, 131_072 + far_on]


def _store_border(
    numbers_ptr: Any, borders_ptr: Any, indices_ptr: Any, SEGMENT: "tl.constexpr"
) -> None:
    place = tl.program_id(0)
    border, index = segment_border(tl.load(numbers_ptr + place), SEGMENT)
    tl.store(borders_ptr + place, border)
    tl.store(indices_ptr + place, index)


@pytest.mark.parametrize("num_splits", [2, 3, 64])
def test_programs_that_share_a_tile_have_whole_segments(num_splits: int) -> None:
    """All keys once, wherever a tile ends and a window begins; one segment is one program's."""
    longer = SEGMENTS_OF_A_LENGTH * SEGMENT
    borders = [0, SEGMENT, 2 * SEGMENT, longer, longer + 2 * SEGMENT, 2 * longer + 4 * SEGMENT]
    ends = [border + more for border in borders[1:] for more in (-1, 0, 1)]
    # Origin, first and last number; with a window, tiles begin with a step of 32 keys.
    tiles = [(first, first, first + end) for first in (0, 1, 7) for end in ends]
    tiles += [(0, max(0, end - seen) // 32 * 32, end) for seen in (1, 100, 1000) for end in ends]
    asked_3B = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
    found_3BS = torch.zeros(3, len(tiles), 64, dtype=torch.int32)
    triton.jit(_store_ranges)[(len(tiles),)](*asked_3B, *found_3BS, num_splits, SEGMENT=SEGMENT)
    for (origin, low, end), begins, stops, (num_live, *_) in zip(
        tiles, *found_3BS.tolist(), strict=True
    ):
        assert [*begins[:num_live], end] == [low, *stops[:num_live]]
        count = num_segments(end - origin, SEGMENT)
        assert num_live == 1 or num_segments(low + 1 - origin, SEGMENT) < count
        for begin in {*begins[:num_live]} - {low}:
            number = begin - origin
            assert num_segments(number, SEGMENT) < num_segments(number + 1, SEGMENT)


def _store_ranges(
    origins_ptr: Any,
    lows_ptr: Any,
    ends_ptr: Any,
    begins_ptr: Any,
    stops_ptr: Any,
    live_ptr: Any,
    num_splits: Any,
    SEGMENT: "tl.constexpr",
) -> None:
    tile, split_S = tl.program_id(0), tl.arange(0, 64)
    origin, low = tl.load(origins_ptr + tile), tl.load(lows_ptr + tile)
    end, place_S = tl.load(ends_ptr + tile), tile * 64 + split_S
    begin_S, stop_S, num_live = split_range(low, end, origin, split_S, num_splits, SEGMENT, True)
    tl.store(begins_ptr + place_S, begin_S)
    tl.store(stops_ptr + place_S, stop_S)
    tl.store(live_ptr + place_S, num_live)
