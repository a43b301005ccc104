"""Kernels prove themselves by their first results: a wrong one is noticed and does no harm.

On a GPU this happens by itself; here kernels run in Triton's interpreter as if on one.
"""

from typing import Any

import pytest
import torch

from fledge.models import attention
from fledge.models.attention import attend_packed
from fledge.ops import kernel_choice, kv
from fledge.ops.attention import AttentionSpec
from fledge.ops.kv import KVPool
from tests.paged_cases import Heads, filled_pool, tree_pass

attention_triton = pytest.importorskip("fledge.ops.paged_attention_triton")
kv_triton = pytest.importorskip("fledge.ops.kv_triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
HEADS, SPEC = Heads(2, 1, 16), AttentionSpec(0.25)
FROM, TO = torch.tensor([[3, 1, 2]]), torch.tensor([[1, 2, 3]])


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_broken", set())
    monkeypatch.setattr(kernel_choice, "_checked", set())
    for module in (attention, kv):
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: True)


def attended() -> torch.Tensor:
    packed = tree_pass([(20, 1, 2), (3, 4, 0)], None)
    pool = filled_pool(packed, HEADS, None, dtype=torch.float32)
    fresh = pool.read(0, packed.view(None).write_slots_T)
    query_THD = torch.ones(packed.num_tokens, 2, 16)
    return attend_packed(packed, pool, 0, query_THD, *fresh, SPEC)


def moved() -> KVPool:
    pool = KVPool(4)
    pool.write(0, torch.arange(4), torch.arange(4.0)[:, None], torch.full((4, 2), float("nan")))
    pool.compact(FROM, TO)
    return pool


def test_right_kernels_are_checked_once() -> None:
    right = attended()
    assert moved().layer(0)[0].flatten().tolist() == [0, 3, 1, 2]
    assert not kernel_choice._broken
    num_checked = len(kernel_choice._checked)
    assert {name for name, _ in kernel_choice._checked} == {
        "attention with heads of 16 in torch.float32",
        "cache writes",
        "moves of cache rows",
    }
    assert torch.equal(attended(), right)
    moved()
    assert len(kernel_choice._checked) == num_checked


def test_wrong_attention_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = attended()
    kernel_choice._checked.clear()
    kernel = attention_triton.attend_paged

    def off_by_a_row(*args: Any) -> torch.Tensor:
        return kernel(*args).roll(1, dims=0)

    monkeypatch.setattr(attention_triton, "attend_paged", off_by_a_row)
    torch.testing.assert_close(attended(), right)
    assert "attention with heads of 16 in torch.float32 is wrong on this device" in caplog.text


def test_wrong_writes_and_moves_are_repaired(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_triton, "write_rows", lambda pools, slots, rows: pools[0].zero_())

    def overwrite(self: Any, from_BL: torch.Tensor, to_BL: torch.Tensor) -> None:
        del self, from_BL
        pool.layer(0)[0][to_BL[0]] = 9.0

    pool = KVPool(4)
    monkeypatch.setattr(kv_triton.RowMover, "move", overwrite)
    pool.write(0, torch.arange(4), torch.arange(4.0)[:, None])
    assert pool.layer(0)[0].flatten().tolist() == [0, 1, 2, 3]
    pool.compact(FROM, TO)
    assert pool.layer(0)[0].flatten().tolist() == [0, 3, 1, 2]
    assert "cache writes is wrong on this device" in caplog.text
    assert "moves of cache rows is wrong on this device" in caplog.text
