"""How cycles begin and end by one kernel each, in Triton's interpreter, against plain operations.

Catches: another request's row, token or slot; an empty place that grows; a draft of the padding, or
a root, that counts as offered; lines of the state that are not a walk's.
"""

from dataclasses import replace

import pytest
import torch

from fledge.ops import kernel_choice
from fledge.ops.accept import Walk
from fledge.ops.embedded import embed_rows
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.norms import Norm, NormKind
from fledge.ops.paged import BlockTables, TreePass
from fledge.ops.root_pass import make_root_pass, parts_of
from fledge.ops.settle import settle
from fledge.ops.tree import depths, root_only
from fledge.ops.tree_pass import make_steady_tree_pass
from tests.steady_cases import (
    LAST_POSITION,
    SPARE_ROW,
    some_ends,
    some_standing,
    some_walk,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
CPU = torch.device("cpu")


def root_pass(size: int, num_lines: int, choice: kernel_choice.KernelChoice) -> TreePass:
    ends, tables = some_ends(size, num_lines, CPU)
    with choose_kernels(choice):
        return make_root_pass(ends, tables, LAST_POSITION)


@pytest.mark.parametrize(("size", "num_lines"), [(1, 1), (5, 6), (8, 1)])
def test_rows_of_newest_tokens(size: int, num_lines: int) -> None:
    fused, plain = (root_pass(size, num_lines, choice) for choice in ("triton", "plain"))
    assert fused.write_slots_T is not None, "the kernel was not asked"
    for ours, expected in zip(parts_of(fused, None), parts_of(plain, None), strict=True):
        assert torch.equal(ours, expected)
    assert (fused.num_short, fused.num_tokens) == (plain.num_short, plain.num_tokens)


def test_rows_of_tables_that_are_narrower_than_their_memory() -> None:
    ends, tables = some_ends(5, 2, CPU)
    width = int(ends.lens_B.max() - 1) // tables.block_size + 1
    table_RP = torch.nn.functional.pad(tables.by_window[None], (0, 3), value=-1)[:, :width]
    narrow, found = BlockTables(tables.block_size, {None: table_RP}), []
    for choice in ("triton", "plain"):
        with choose_kernels(choice):
            found.append(make_root_pass(ends, narrow, LAST_POSITION))
    fused, plain = found
    assert fused.write_slots_T is not None, "the kernel was not asked"
    assert fused.tables.by_window[None].stride() == (width, 1)
    for ours, expected in zip(parts_of(fused, None), parts_of(plain, None), strict=True):
        assert torch.equal(ours, expected)


def test_tables_of_several_windows_are_left_to_plain_operations() -> None:
    ends, tables = some_ends(3, 2, CPU)
    table_RP = tables.by_window[None]
    both = BlockTables(tables.block_size, {None: table_RP, 8: table_RP.flip(1)})
    with choose_kernels("triton"):
        packed = make_root_pass(ends, both, LAST_POSITION)
    assert not torch.equal(packed.view(None).write_slots_T, packed.view(8).write_slots_T)


@pytest.mark.parametrize("sizes", [[5], [9, 0, 7, 1, 30, 12]])
def test_rows_of_trees(sizes: list[int]) -> None:
    _, trees = some_walk(sizes, CPU)
    trees.parents_BN[0, 2:] = torch.arange(2, trees.max_size)  # written below themselves
    for max_depth in (None, int(depths(trees.parents_BN).max())):
        found = []
        for choice in ("triton", "plain"):
            ends, tables = some_ends(len(sizes), 3, CPU)
            ends.lens_B.sub_(30).clamp_(min=2)
            with choose_kernels(choice):
                asked = replace(trees, max_depth=max_depth)
                found.append(make_steady_tree_pass(ends, asked, tables, 20))
        (fused, rows_BN), (plain, wanted_BN) = found
        assert fused.write_slots_T is not None, "the kernel was not asked"
        assert torch.equal(rows_BN, wanted_BN)
        for ours, expected in zip(parts_of(fused, None), parts_of(plain, None), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", ["cast_first", "cast_last", "one_plus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_beginning_of_a_pass(dtype: torch.dtype, kind: NormKind) -> None:
    """Sizes that are no powers of two; what is looked up has the same bits."""
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(9, 40, generator=generator).to(dtype)
    tables = {"": torch.randn(12, 6, generator=generator).to(dtype)}
    norm = Norm(torch.randn(40, generator=generator).to(dtype), 1e-5, kind)
    tokens_T, positions_T = torch.tensor([8, 0, 3, 8]), torch.tensor([0, 11, 5, 5])
    with choose_kernels("triton"):
        fused = embed_rows(weight_VD, tokens_T, norm, tables, positions_T)
    plain = embed_rows(weight_VD, tokens_T, norm, tables, positions_T)
    assert torch.equal(fused.stream_TD, plain.stream_TD)
    assert torch.equal(fused.angles[""], plain.angles[""])
    close = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(fused.normed_TD, plain.normed_TD, **close)


def test_two_kinds_of_rotations_are_looked_up_one_by_one() -> None:
    tables = {"full": torch.randn(5, 4), "window": torch.randn(5, 4)}
    norm, positions_T = Norm(torch.ones(8), 1e-5, "cast_first"), torch.tensor([4, 0])
    with choose_kernels("triton"):
        found = embed_rows(torch.randn(3, 8), torch.tensor([1, 2]), norm, tables, positions_T)
    for name, table in tables.items():
        assert torch.equal(found.angles[name], table[positions_T])


def check_settled(sizes: list[int], walk: Walk, with_drafts: bool) -> None:
    _, trees = some_walk(sizes, CPU)
    if not with_drafts:
        trees = root_only(trees.tokens_BN[:, 0])
    found = []
    for choice in ("triton", "plain"):
        standing = some_standing(len(sizes), CPU)
        with choose_kernels(choice):
            settle(walk, trees, standing, SPARE_ROW)
        found.append(standing)
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("sizes", [[4], [9, 0, 7, 1, 30, 12]])
def test_what_follows_from_walks(sizes: list[int]) -> None:
    walk, _ = some_walk(sizes, CPU)
    check_settled(sizes, walk, with_drafts=True)


@pytest.mark.parametrize("size", [1, 4])
def test_what_follows_without_drafts(size: int) -> None:
    walk, _ = some_walk([0] * size, CPU)
    one = Walk(
        walk.tokens_BL[:, :1], walk.nodes_BL[:, :1], walk.lengths_B, walk.failed_B, logprobs=None
    )
    check_settled([0] * size, one, with_drafts=False)
    standing = some_standing(size, CPU)
    before = standing.lens_B.clone()
    settle(one, root_only(one.tokens_BL[:, 0]), standing, SPARE_ROW)
    assert (standing.lens_B - before).tolist() == [1] * (size - 1) + [0], "the last is empty"
    assert standing.facts_XB[1].tolist() == [0] * size, "nothing was offered"


def test_a_kernel_that_is_wrong_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written in place is undone before plain operations take its place."""
    from fledge.ops import settle as module
    from fledge.ops import settle_triton

    sizes = [3, 2]
    walk, trees = some_walk(sizes, CPU)
    standing, expected = some_standing(2, CPU), some_standing(2, CPU)
    settle(walk, trees, expected, SPARE_ROW)
    monkeypatch.setattr(module, "uses_kernels", lambda _: True)
    monkeypatch.setattr(kernel_choice, "_broken", set())
    monkeypatch.setattr(settle_triton, "settle_places", lambda *_: standing.lens_B.add_(5))
    settle(walk, trees, standing, SPARE_ROW)
    assert kernel_choice._broken == {"what follows from walks"}
    for ours, wanted in zip(standing, expected, strict=True):
        assert torch.equal(ours, wanted)
