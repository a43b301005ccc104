"""Packed products: the same numbers as torch's own, and a row that does not see its neighbours."""

import pytest
import torch
import torch.nn.functional as F

from fledge.ops import product
from fledge.ops.product import Product, can_be_packed

SMALL = torch.zeros(1)
needs_packing = pytest.mark.skipif(
    not can_be_packed(SMALL, 1), reason="this build of torch does not pack weights"
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 130])
def test_packed_equals_plain(num_rows: int, has_bias: bool) -> None:
    weight, rows = random(70, 96), random(num_rows, 96, seed=1)
    bias = random(70, seed=2) if has_bias else None
    packed = Product(weight, bias, is_packed=True)(rows)
    torch.testing.assert_close(packed, F.linear(rows, weight, bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed, Product(weight, bias, is_packed=False)(rows))


@needs_packing
def test_a_row_comes_out_the_same_in_any_company() -> None:
    weight, rows = random(576, 1536), random(40, 1536, seed=1)
    packed = Product(weight, None, is_packed=True)
    together = packed(rows)
    for count in (4, 8, 12, 16, 32):
        # To the last bit on the processors tried; others may order a sum by its length.
        torch.testing.assert_close(packed(rows[:count]), together[:count], rtol=1e-6, atol=1e-5)
    # With other counts AMD's processors order sums otherwise: no more than rounding may differ.
    rounding = torch.finfo(torch.float32).eps * F.linear(rows.abs(), weight.abs())
    exact = F.linear(rows.double(), weight.double())
    for count in (1, 2, 3, 5, 13, 40):
        assert ((packed(rows[:count]) - exact[:count]).abs() <= 2 * rounding[:count]).all()


@needs_packing
def test_packing_needs_room_and_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "available_memory", lambda: 1000)
    assert can_be_packed(SMALL, 250)
    assert not can_be_packed(SMALL, 251)
    assert not can_be_packed(SMALL.bfloat16(), 1)
    monkeypatch.setattr(product, "available_memory", lambda: None)
    assert not can_be_packed(SMALL, 1)
