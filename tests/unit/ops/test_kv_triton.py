"""Kernels that write and move cache rows, in Triton's interpreter, against indexed assignment.

Catches: a head or column left out, strides taken for dense rows, layers of another width or
precision moved as if alike, rows overwritten before they were read, rows stored without a slot.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool

write_rows = pytest.importorskip("fledge.ops.kv_triton").write_rows
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(shapes: list[list[tuple[int, ...]]], num_slots: int, dtype: torch.dtype) -> KVPool:
    pool = KVPool(num_slots)
    for layer, rows in enumerate(shapes):
        fresh = [random(num_slots, *one, dtype=dtype, seed=i) for i, one in enumerate(rows)]
        pool.write(layer, torch.arange(num_slots), *fresh)
    return pool


def check_both_ways(make: Callable[[], KVPool], run: Callable[[KVPool], None]) -> None:
    fused, plain = make(), make()
    with choose_kernels("triton"):
        run(fused)
    run(plain)
    for layer in plain.layer_ids:
        for ours, wanted in zip(fused.layer(layer), plain.layer(layer), strict=True):
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shapes", [((2, 64), (2, 64)), ((3, 24), (3, 10)), ((70,),), ((1, 1), (2, 1100))]
)
def test_rows_land_at_their_slots(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    slots_T = torch.tensor([7, 0, 3, 19, 18])
    rows = [random(5, *shape, dtype=dtype, seed=9) for shape in shapes]
    # As models bring them: heads first in memory.
    heads_first = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in rows]
    check_both_ways(
        lambda: filled([list(shapes)], 20, dtype), lambda pool: pool.write(0, slots_T, *heads_first)
    )


def test_a_row_without_a_slot_is_stored_nowhere() -> None:
    pool, before = random(4, 2, 8), random(4, 2, 8)
    write_rows([pool], torch.tensor([-1, 2, -16]), [torch.ones(3, 2, 8)])
    assert pool[2].eq(1).all()
    others = [0, 1, 3]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_moves", [1, 2, 5, 12])
def test_moves_of_a_group_may_overlap(num_moves: int, dtype: torch.dtype) -> None:
    """Layers of different widths, one of them odd; every source may be another move's target."""
    generator = torch.Generator().manual_seed(num_moves)
    from_BL = torch.randint(0, 12, (3, num_moves), generator=generator)
    to_BL = torch.rand(3, 12, generator=generator).argsort(dim=1)[:, :num_moves]
    first_B1 = 12 * torch.arange(3)[:, None]
    shapes: list[list[tuple[int, ...]]] = [[(2, 16), (2, 16)], [(5,)], [(1, 900), (1, 3)]]
    check_both_ways(
        lambda: filled(shapes, 36, dtype),
        lambda pool: pool.compact(first_B1 + from_BL, first_B1 + to_BL),
    )


def test_accepted_nodes_move_to_the_front() -> None:
    """Root, b and d of a tree that lies in slots 4 to 8, as after a walk."""
    pool = filled([[(1, 4)]], 10, torch.float32)
    before = pool.layer(0)[0].clone()
    with choose_kernels("triton"):
        pool.compact(torch.tensor([[4, 6, 8, 7]]), torch.tensor([[4, 5, 6, 7]]))
    assert torch.equal(pool.layer(0)[0], before[[0, 1, 2, 3, 4, 6, 8, 7, 8, 9]])


def test_a_layer_that_comes_later_is_moved_too() -> None:
    slots = torch.tensor([[0]]), torch.tensor([[1]])
    pool = filled([[(4,)]], 2, torch.float32)
    with choose_kernels("triton"):
        pool.compact(*slots)
        pool.write(5, torch.tensor([0, 1]), torch.tensor([[1.0], [2.0]]))
        pool.compact(*slots)
    assert pool.layer(5)[0].flatten().tolist() == [1.0, 1.0]


def test_more_moves_than_a_kernel_takes_and_an_empty_memory() -> None:
    moves = torch.arange(199, -1, -1)[None]
    with choose_kernels("triton"):
        KVPool(3).compact(moves, moves)
        pool = filled([[(1,)]], 200, torch.float32)
        before = pool.layer(0)[0].clone()
        pool.compact(moves, torch.arange(200)[None])
    assert torch.equal(pool.layer(0)[0], before.flip(0))
