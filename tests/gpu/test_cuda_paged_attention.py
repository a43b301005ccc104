"""Paged attention, cache writes and moves on a GPU: as the plain path says, without waiting.

Contexts up to 32k tokens, every head size, bfloat16, float16 and float32; the same bits in any
company; captured once, replayed with other lengths; moves that overlap, often enough that a race
would show.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fledge.models.attention import attend_packed
from fledge.ops import paged_shape
from fledge.ops.attention import AttentionSpec, attend_plain
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.paged import FrontierPass, TreePass
from tests.paged_cases import Heads, filled_pool, frontier_pass, tree_pass
from tests.paged_company import Company, Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
ERRORS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
LLAMA, ODD, THIRDS = Heads(32, 8, 128), Heads(7, 1, 64), Heads(9, 3, 96)
SMOLLM2 = Heads(9, 3, 64)
MIXED = [(4096, 1, 15), (31, 1, 3), (0, 700, 0), (16, 1, 0), (2000, 33, 0)]
PASSES = {
    "one token": [(0, 1, 0)],
    "context 1": [(1, 1, 0), (1, 1, 1)],
    "mixed": MIXED,
    "64 drafts at 32k": [(32_768, 1, 64)],
    "plain at 32k": [(32_768, 1, 0), (5, 1, 0)],
    "chunk behind 8k": [(8192, 512, 0)],
    "many": [(17 * i, 1, i % 7) for i in range(100)],
}

COMPANIES = [
    *(Company(1, rows) for rows in (2, 6, 8, 25, 64)),
    *(Company(8, rows) for rows in (1, 6)),
    *(Company(64, rows) for rows in (1, 6)),
    Company(300, 1),
    *(Company(1, rows, is_chunk=True) for rows in (3, 16, 64)),
    Company(20, 64, is_chunk=True),
]


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    with choose_kernels("triton"):
        yield
    torch.cuda.set_sync_debug_mode("default")


def query_of(packed: TreePass | FrontierPass, heads: Heads, dtype: torch.dtype) -> Tensor:
    """As models bring them: heads first in memory."""
    generator = torch.Generator(device=CUDA).manual_seed(3)
    shape = (heads.query, packed.num_tokens, heads.size)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype).transpose(0, 1)


def attend(
    packed: TreePass | FrontierPass, pool: KVPool, query_THD: Tensor, spec: AttentionSpec
) -> Tensor:
    slots_T = packed.view(spec.window).write_slots_T
    return attend_packed(packed, pool, 0, query_THD, *pool.read(0, slots_T), spec)


def plain(
    packed: TreePass | FrontierPass, pool: KVPool, query_THD: Tensor, spec: AttentionSpec
) -> Tensor:
    """In float32, request by request."""
    if spec.sinks_H is not None:
        spec = replace(spec, sinks_H=spec.sinks_H.float())
    packed.views.clear()
    outputs = []
    for segment in packed.view(spec.window).segments():
        keys, values = (one.float() for one in pool.read(0, segment.key_slots_K))
        outputs.append(attend_plain(query_THD[segment.rows].float(), keys, values, segment, spec))
    return torch.cat(outputs)


def check(
    packed: TreePass | FrontierPass, heads: Heads, dtype: torch.dtype, **spec: object
) -> None:
    window = spec.get("window")
    assert window is None or isinstance(window, int)
    asked = AttentionSpec(heads.size**-0.5, **spec)  # type: ignore[arg-type]
    pool = filled_pool(packed, heads, window, dtype=dtype)
    query_THD = query_of(packed, heads, dtype)
    got = attend(packed, pool, query_THD, asked)
    assert got.dtype == dtype
    assert_close(got, plain(packed, pool, query_THD, asked), ERRORS[dtype])


def assert_close(got: Tensor, wanted: Tensor, error: float) -> None:
    """Row by row: one wrong row of thousands must show."""
    lengths = wanted.norm(dim=-1)
    worst = float(((got.float() - wanted).norm(dim=-1) / lengths).max())
    assert worst < error, f"relative error {worst:.2e} in the worst row"


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_trees_and_chunks(name: str, dtype: torch.dtype) -> None:
    check(tree_pass(PASSES[name], None, device=CUDA), LLAMA, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "heads",
    [ODD, THIRDS, Heads(8, 8, 64), Heads(8, 4, 256), Heads(16, 1, 128), Heads(4, 4, 192, 128)],
)
def test_head_sizes_and_groups(heads: Heads, dtype: torch.dtype) -> None:
    check(tree_pass(MIXED, None, device=CUDA), heads, dtype)


@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [
        (LLAMA, None, torch.bfloat16),
        (SMOLLM2, None, torch.bfloat16),
        (SMOLLM2, None, torch.float32),
        pytest.param(
            *(THIRDS, 200, torch.float16),
            marks=pytest.mark.xfail(
                reason="one row of a chain of two behind five tokens differed on an H200; the "
                "interpreter finds no difference, and the cause is not known",
                strict=False,
            ),
        ),
    ],
    ids=str,
)
def test_company_changes_no_bits(heads: Heads, window: int | None, dtype: torch.dtype) -> None:
    """Tiles of all sizes, and keys split over few programs, many or none.

    Where memory is for many tokens, a second kernel joins the parts.
    """
    like = torch.empty(0, dtype=dtype, device=CUDA)
    for most_tokens, contexts in ((13_000, (5, 253, 1000, 9000)), (9_100, (5, 1000, 9000))):
        request = Request(heads, most_tokens, AttentionSpec(heads.size**-0.5, window), like)
        for context in contexts:
            alone = request.attend_alone(context, 64)
            for company in COMPANIES:
                found = request.attend(context, company)
                is_other = (found != alone[: company.rows]).flatten(2).any(dim=2)
                assert not is_other.any(), f"{company} behind {context}: {int(is_other.sum())} rows"


def test_long_contexts_have_the_bits_of_short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins the parts of a tile, and how many programs share it, changes no bit."""
    request = Request(
        LLAMA, 33_000, AttentionSpec(LLAMA.size**-0.5), torch.empty(0, dtype=torch.bfloat16).cuda()
    )
    asked = [(context, Company(4, rows)) for context in (300, 8190, 32_768) for rows in (1, 6)]
    found = [request.attend(*one) for one in asked]
    monkeypatch.setattr(paged_shape, "_LONG_PARTS", 10_000)
    for one, other in zip(asked, found, strict=True):
        assert torch.equal(request.attend(*one), other), str(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [1, 64, 1000])
def test_windows(window: int, dtype: torch.dtype) -> None:
    check(tree_pass(MIXED, window, device=CUDA), THIRDS, dtype, window=window)
    packed = frontier_pass([900, 3, 64], 8, 5, window, first=1, device=CUDA)
    check(packed, LLAMA, dtype, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("context", "window"), [(17_800, 300), (34_000, 512), (70_000, 1024)])
def test_windows_far_on(context: int, window: int, dtype: torch.dtype) -> None:
    """Segments are longer there than the window: programs that share a tile may have no keys."""
    check(tree_pass([(context, 1, 0)], window, device=CUDA), LLAMA, dtype, window=window)
    check(tree_pass([(context, 1, 5)], window, device=CUDA), LLAMA, dtype, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_soft_caps_and_sinks(dtype: torch.dtype) -> None:
    sinks_H = torch.linspace(-2, 3, ODD.query, device=CUDA).to(dtype)
    packed = tree_pass(MIXED, None, device=CUDA)
    check(packed, ODD, dtype, soft_cap=5.0)
    check(packed, ODD, dtype, sinks_H=sinks_H)
    check(tree_pass(MIXED, 100, device=CUDA), ODD, dtype, sinks_H=sinks_H, window=100)


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(("contexts", "width", "level"), [([1], 1, 1), ([32_768, 40, 3], 8, 6)])
def test_frontiers(contexts: list[int], width: int, level: int, dtype: torch.dtype) -> None:
    packed = frontier_pass(contexts, width, level, None, first=1, device=CUDA)
    check(packed, LLAMA, dtype)


def test_one_capture_serves_other_lengths() -> None:
    """What a captured cycle needs: lengths, tables and trees are read when it is replayed."""
    dtype, spec = torch.bfloat16, AttentionSpec(LLAMA.size**-0.5)
    cases = [
        tree_pass(requests, None, seed=seed, device=CUDA)
        for seed, requests in enumerate(
            [
                [(900, 1, 7), (64, 1, 3), (2000, 1, 2)],
                [(15, 1, 2), (1999, 1, 9), (700, 1, 1)],
                [(3, 1, 0), (0, 1, 0), (2001, 1, 12)],
            ]
        )
    ]
    width = max(case.tables.by_window[None].shape[1] for case in cases)
    nodes = max(case.seen_BNN.shape[1] for case in cases if case.seen_BNN is not None)
    live = [_widened(case, width, nodes) for case in cases]
    num_slots = 3 * width * 16
    generator = torch.Generator(device=CUDA).manual_seed(5)
    shape = (num_slots, LLAMA.key, LLAMA.size)
    rows = [torch.randn(shape, generator=generator, device=CUDA).to(dtype) for _ in range(2)]
    pool = KVPool(num_slots)
    pool.write(0, torch.arange(num_slots, device=CUDA), *rows)
    query_THD = query_of(live[0], LLAMA, dtype)
    fresh = tuple(one[: live[0].num_tokens] for one in rows)
    static = live[0]

    def run() -> Tensor:
        static.views.clear()
        return attend_packed(static, pool, 0, query_THD, *fresh, spec)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THD = run()
    for case in [*live[1:], live[0]]:
        _overwrite(static, _copy_of(case))
        graph.replay()
        wanted = plain(static, pool, query_THD, spec)
        assert_close(out_THD, wanted, ERRORS[dtype])


def _widened(packed: TreePass, width: int, nodes: int) -> TreePass:
    """The pass with tables and trees of a common width: what a bucket of captured passes has."""
    table_BP, seen_BNN = packed.tables.by_window[None], packed.seen_BNN
    assert seen_BNN is not None
    wide_BP = torch.full((3, width), -1, device=CUDA)
    wide_BP[:, : table_BP.shape[1]] = table_BP
    wide_BNN = torch.zeros(3, nodes, nodes, dtype=torch.bool, device=CUDA)
    wide_BNN[:, : seen_BNN.shape[1], : seen_BNN.shape[2]] = seen_BNN
    tables = replace(packed.tables, by_window={None: wide_BP})
    return replace(packed, tables=tables, seen_BNN=wide_BNN, views={})


def _tensors(packed: TreePass) -> list[Tensor]:
    named = [getattr(packed, name) for name in packed.__dataclass_fields__]
    found = [one for one in named if isinstance(one, Tensor)]
    return [*found, packed.tables.by_window[None]]


def _copy_of(packed: TreePass) -> list[Tensor]:
    return [one.clone() for one in _tensors(packed)]


def _overwrite(packed: TreePass, values: list[Tensor]) -> None:
    for old, new in zip(_tensors(packed), values, strict=True):
        old.copy_(new)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nobody_waits_for_the_device() -> None:
    spec = AttentionSpec(LLAMA.size**-0.5)
    for packed in (
        tree_pass(MIXED, None, device=CUDA),
        frontier_pass([70, 5], 4, 2, None, device=CUDA),
    ):
        pool = filled_pool(packed, LLAMA, None, dtype=torch.bfloat16)
        query_THD = query_of(packed, LLAMA, torch.bfloat16)
        slots_T = packed.view(None).write_slots_T
        fresh = pool.read(0, slots_T)
        moves_BL = slots_T[:4].view(2, 2)

        def run(packed: TreePass | FrontierPass = packed) -> Tensor:
            packed.views.clear()
            out = attend_packed(packed, pool, 0, query_THD, *fresh, spec)  # noqa: B023
            pool.compact(moves_BL, moves_BL.flip(1))  # noqa: B023
            return out

        expected = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected)


def both_ways(run: Callable[[], None], pool: KVPool) -> tuple[list[Tensor], list[Tensor]]:
    """All rows of the memory after the kernel and, from the same start, after its twin."""
    start = [one.clone() for layer in sorted(pool.layer_ids) for one in pool.layer(layer)]
    run()
    fused = [one.clone() for layer in sorted(pool.layer_ids) for one in pool.layer(layer)]
    for layer in sorted(pool.layer_ids):
        for one in pool.layer(layer):
            one.copy_(start.pop(0))
    with choose_kernels("plain"):
        run()
    return fused, [one for layer in sorted(pool.layer_ids) for one in pool.layer(layer)]


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_writes_land_where_the_twin_puts_them(dtype: torch.dtype) -> None:
    generator = torch.Generator(device=CUDA).manual_seed(0)
    pool, num_slots = KVPool(5000), 5000
    for layer, shapes in enumerate([((8, 128), (8, 128)), ((3, 96), (3, 64)), ((4096,),)]):
        rows = [torch.randn(1000, *shape, generator=generator, device=CUDA) for shape in shapes]
        pool.write(layer, torch.arange(1000, device=CUDA), *(one.to(dtype) for one in rows))
        slots_T = torch.randperm(num_slots, generator=generator, device=CUDA)[:1000]
        heads_first = [one.to(dtype).transpose(0, 1).contiguous().transpose(0, 1) for one in rows]

        def write(
            layer: int = layer, slots: Tensor = slots_T, rows: list[Tensor] = heads_first
        ) -> None:
            pool.write(layer, slots, *rows)

        fused, wanted = both_ways(write, pool)
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(fused, wanted, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_overlapping_moves_many_times(dtype: torch.dtype) -> None:
    """Shifts, swaps and cycles inside groups: each reads a row that another one writes."""
    generator = torch.Generator(device=CUDA).manual_seed(0)
    num_groups, size = 64, 24
    pool = KVPool(num_groups * size)
    every = torch.arange(num_groups * size, device=CUDA)
    for layer in range(6):
        shape = (num_groups * size, 8, 128 if layer % 2 else 96)
        keys = torch.randn(shape, generator=generator, device=CUDA).to(dtype)
        pool.write(layer, every, keys, keys + 1)
    for num_moves in [1, 2, 7, 16, 24]:
        for _ in range(20):
            order = torch.rand(num_groups, size, generator=generator, device=CUDA)
            to_BL = order.argsort(dim=1)[:, :num_moves]
            from_BL = torch.randint(
                0, size, (num_groups, num_moves), generator=generator, device=CUDA
            )
            first_B1 = torch.arange(num_groups, device=CUDA)[:, None] * size
            moves = (first_B1 + from_BL, first_B1 + to_BL)
            fused, wanted = both_ways(lambda moves=moves: pool.compact(*moves), pool)
            assert all(torch.equal(a, b) for a, b in zip(fused, wanted, strict=True))
