"""Cache memory by slots: what is written is read, what is moved arrives, windows keep apart.

Catches: rows overwritten before they were read, a layer or a tensor left out of a move, layers of
different windows in one memory, and a probe that counts a slot or a layer too many.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fledge.ops.kv import KVGroups, KVPool, KVProbe


def rows(*values: int) -> Tensor:
    """Rows of a pool that can be recognised: [T, 1, 2], filled with the value."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 1, 2).clone()


def test_pool_reads_slots_in_the_order_asked() -> None:
    pool = KVPool(6)
    pool.write(0, torch.tensor([4, 1, 3]), rows(40, 10, 30), rows(41, 11, 31))
    keys, values = pool.read(0, torch.tensor([1, 4, 3, 1]))
    assert keys[:, 0, 0].tolist() == [10, 40, 30, 10]
    assert values[:, 0, 0].tolist() == [11, 41, 31, 11]
    assert pool.layer_ids == {0}
    assert pool.num_bytes == 2 * 6 * 2 * 4


def test_a_pool_keeps_whatever_belongs_to_a_slot() -> None:
    """One tensor or several, in any shape and precision: a head keeps features as well."""
    pool = KVPool(3)
    pool.write(7, torch.tensor([2]), torch.full((1, 5), 3.0, dtype=torch.bfloat16))
    (features,) = pool.read(7, torch.tensor([2]))
    assert features.tolist() == [[3.0] * 5]
    assert pool.num_bytes == 3 * 5 * 2


def test_a_pool_without_slots_takes_no_bytes() -> None:
    assert KVPool().num_bytes == 0
    assert KVPool(10).num_bytes == 0, "nothing is allocated before it is written"


@given(st.data())
def test_moves_may_overlap(data: st.DataObject) -> None:
    """Every target row holds what its source held before anything moved, in every layer."""
    size = 12
    count = data.draw(st.integers(1, size))
    slots = st.lists(st.integers(0, size - 1), min_size=count, max_size=count)
    sources = data.draw(slots)
    targets = data.draw(st.permutations(range(size)))[:count]
    pool = KVPool(size)
    for layer in (0, 3):
        filled = rows(*range(size)) + 100 * layer
        pool.write(layer, torch.arange(size), filled, filled + 50)
    pool.move(torch.tensor(sources), torch.tensor(targets))
    expected = list(range(size))
    for source, target in zip(sources, targets, strict=True):
        expected[target] = source
    for layer in (0, 3):
        keys, values = pool.read(layer, torch.arange(size))
        assert keys[:, 0, 0].tolist() == [100 * layer + value for value in expected]
        assert values[:, 0, 0].tolist() == [100 * layer + 50 + value for value in expected]


def test_windows_have_slots_of_their_own() -> None:
    groups = KVGroups({None: 4, 8: 2})
    groups.for_window(None).write(0, torch.tensor([1]), rows(5))
    groups.for_window(8).write(1, torch.tensor([1]), rows(6))
    assert groups.for_window(None).read(0, torch.tensor([1]))[0].flatten().tolist() == [5, 5]
    assert groups.for_window(8).read(1, torch.tensor([1]))[0].flatten().tolist() == [6, 6]
    assert groups.for_window(None).layer_ids == {0}
    assert groups.num_bytes == (4 + 2) * 2 * 4
    with pytest.raises(KeyError):
        groups.for_window(9)


def test_a_single_pool_serves_every_window() -> None:
    pool = KVPool(2)
    assert pool.for_window(None) is pool
    assert pool.for_window(8) is pool


def test_a_probe_learns_windows_and_bytes_from_one_token() -> None:
    probe = KVProbe()
    for layer, window in enumerate([8, None, 8, None, 8]):
        memory = probe.for_window(window)
        memory.write(layer, torch.tensor([0]), rows(1), rows(2))
        assert memory.read(layer, torch.tensor([0]))[1].flatten().tolist() == [2, 2]
    assert probe.bytes_per_slot == {8: 3 * 2 * 2 * 4, None: 2 * 2 * 2 * 4}
