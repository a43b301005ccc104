"""How cycles begin and end by a kernel each on a GPU: as plain operations say, without waiting."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fledge.engine.graphs import Graphs
from fledge.ops.copies import copy_chains, find_copies
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.paged_segments_triton import counts_for
from fledge.ops.root_pass import make_root_pass, parts_of
from fledge.ops.settle import settle
from fledge.ops.tree_pass import make_steady_tree_pass
from tests.copy_cases import some_chains, some_maps, some_text
from tests.steady_cases import (
    LAST_POSITION,
    SPARE_ROW,
    some_ends,
    some_standing,
    some_walk,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with choose_kernels("triton"):
        yield
    torch.cuda.set_sync_debug_mode("default")


def on_gpu_and_cpu(
    work: Callable[[torch.device], tuple[Tensor, ...]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the kernel makes and what plain operations make, the second time."""
    gpu = torch.device("cuda", 0)
    found = work(gpu)
    with choose_kernels("plain"):
        expected = work(torch.device("cpu"))
    return zip((one.cpu() for one in found), expected, strict=True)


@pytest.mark.parametrize(("size", "num_lines"), [(1, 1), (1, 6), (3, 2), (8, 6)])
def test_rows_of_newest_tokens(size: int, num_lines: int) -> None:
    def work(device: torch.device) -> tuple[Tensor, ...]:
        ends, tables = some_ends(size, num_lines, device)
        packed = make_root_pass(ends, tables, LAST_POSITION)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            packed = make_root_pass(ends, tables, LAST_POSITION)
            torch.cuda.set_sync_debug_mode("default")
        return parts_of(packed, None)

    for ours, expected in on_gpu_and_cpu(work):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("count", "window"), [(7, None), (1, None), (4, 40)])
@pytest.mark.parametrize("probability", [0.3, 0.7, 0.95])
def test_copied_chains(count: int, window: int | None, probability: float) -> None:
    def work(device: torch.device) -> tuple[Tensor, ...]:
        text, _ = some_text(device, window)
        firsts = find_copies(text, count).tokens_BC[:, 0].tolist()
        firsts[5] = 499
        chains = some_chains(firsts, probability, count, device)
        sampled_B = torch.arange(len(firsts), device=device) % 2 == 1
        maps = some_maps(device)
        found = copy_chains(chains, text, sampled_B, maps)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            found = copy_chains(chains, text, sampled_B, maps)
            torch.cuda.set_sync_debug_mode("default")
        made = found.candidates
        rounded = [(one * 1e4).round() / 1e4 for one in (made.scores_BC, made.logprobs_BC)]
        return found.is_copied_B, made.tokens_BC, *rounded

    for ours, expected in on_gpu_and_cpu(work):
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("sizes", [[0], [4], [9, 0, 7, 1, 30, 12]])
def test_what_follows_from_walks(sizes: list[int]) -> None:
    def work(device: torch.device) -> tuple[Tensor, ...]:
        walk, trees = some_walk(sizes, device)
        standing = some_standing(len(sizes), device)
        settle(walk, trees, standing, SPARE_ROW)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        settle(walk, trees, standing, SPARE_ROW)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        return tuple(standing)

    for ours, expected in on_gpu_and_cpu(work):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("sizes", [[5], [9, 0, 7, 1, 30, 12]])
def test_rows_of_trees(sizes: list[int]) -> None:
    def work(device: torch.device) -> tuple[Tensor, ...]:
        _, trees = some_walk(sizes, device)
        ends, tables = some_ends(len(sizes), 3, device)
        ends.lens_B.sub_(30).clamp_(min=2)
        found = make_steady_tree_pass(ends, trees, tables, 20)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            found = make_steady_tree_pass(ends, trees, tables, 20)
            torch.cuda.set_sync_debug_mode("default")
        return found.rows_BN, *parts_of(found.packed, None)

    for ours, expected in on_gpu_and_cpu(work):
        assert torch.equal(ours, expected)


def test_counts_are_made_before_captures() -> None:
    """Made in a capture, each layer of each replay would set them to zero."""
    device = torch.device("cuda", 0)
    graphs = Graphs(device)

    def work() -> tuple[Tensor, Tensor]:
        counts = counts_for(device)
        return counts, counts.sum()

    places = set()
    for kind in ("one", "other"):
        for _ in range(2):
            (counts, total), number = graphs.run(kind, work)
        assert number is not None, "it was captured"
        places.add(counts.data_ptr())
        assert int(total) == 0
    assert len(places) == 1
