"""Our own layers on a GPU: kernels against their twins in bfloat16, passes against transformers.

Also that a pass asks the device nothing and can be captured: a captured pass is replayed over new
tokens, positions and lengths, and must say what the same pass says without a graph.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.models.fast_families import FAMILIES
from fledge.models.target import Target
from fledge.models.target_path import choose_target_path
from fledge.ops.documents import make_documents
from fledge.ops.experts import multiply_by_expert
from fledge.ops.gated import Activation, gated
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVGroups
from fledge.ops.norms import Norm, NormKind, residual_norm
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.rope_write import HeadLayout, Rotation, rotate_and_store, split_heads
from fledge.testing import ARCHITECTURES, target_of, tiny_head, tiny_model
from tests.lossless.support import greedy, prompts, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
FAST = sorted(name for name, one in ARCHITECTURES.items() if one["model_type"] in FAMILIES)
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# Every case is a kernel to compile, or four: all of them in bfloat16, each value in the others.
NORM_KINDS: tuple[NormKind, ...] = ("cast_first", "cast_last", "one_plus")
NORM_CASES = [
    *itertools.product(NORM_KINDS, (64, 576, 4096, 5120), [torch.bfloat16]),
    *itertools.product(NORM_KINDS, (576, 5120), [torch.float32]),
    *zip(NORM_KINDS, (64, 4096, 5120), [torch.float16] * 3, strict=True),
]
HEADS = ((9, 3, 64), (32, 8, 128), (4, 1, 256), (3, 1, 96))
TURN_KINDS: tuple[NormKind | None, ...] = (None, "cast_first", "one_plus")
TURN_CASES = [
    *itertools.product(HEADS, TURN_KINDS, [torch.bfloat16], [False, True]),
    *itertools.product(HEADS, TURN_KINDS, [torch.float32], [False]),
    *zip(HEADS, (*TURN_KINDS, None), [torch.float16] * 4, [False, True] * 2, strict=True),
]
BLOCK, BLOCKS = 16, 8


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def check_near(ours: Tensor, theirs: Tensor, limit: float) -> None:
    difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert difference <= limit, f"{float(difference):.2g} is more than {limit:.2g}"


@pytest.mark.parametrize(("kind", "size", "dtype"), NORM_CASES, ids=str)
def test_norms(kind: NormKind, size: int, dtype: torch.dtype) -> None:
    fresh, stream = (random(37, size, dtype=dtype, seed=i) for i in (1, 2))
    norms = [Norm(random(size, dtype=dtype, seed=i), 1e-6, kind) for i in (3, 4)]
    for given, after, before in (
        (None, None, norms[1]),
        (stream, None, norms[1]),
        (stream, norms[0], None),
        (stream, norms[0], norms[1]),
    ):
        with choose_kernels("triton"):
            got = residual_norm(fresh, given, after=after, before=before)
        with choose_kernels("plain"):
            wanted = residual_norm(fresh, given, after=after, before=before)
        for ours, theirs in zip(got, wanted, strict=True):
            check_near(ours, theirs, LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [48, 1536, 14336])
def test_gates(size: int, activation: Activation, dtype: torch.dtype) -> None:
    both = random(33, 2 * size, dtype=dtype) * 3
    with choose_kernels("triton"):
        got = gated(both, activation)
    with choose_kernels("plain"):
        check_near(got, gated(both, activation), LIMITS[dtype])


@pytest.mark.parametrize(("heads", "kind", "dtype", "is_wide"), TURN_CASES, ids=str)
def test_rotations(
    heads: tuple[int, int, int], kind: NormKind | None, dtype: torch.dtype, is_wide: bool
) -> None:
    num_heads, num_groups, size = heads
    norm = None
    if kind is not None:
        norm = Norm(random(num_heads + num_groups, size, dtype=dtype, seed=5), 1e-6, kind)
    layout = HeadLayout(num_heads, num_groups, size, norm)
    product = random(21, (num_heads + 2 * num_groups) * size, dtype=dtype)
    angles = random(21, size // 2, dtype=torch.float32, seed=7) * 100
    rows = torch.cat([angles.cos(), angles.sin()], dim=-1)
    rotation = Rotation(rows if is_wide else rows.to(dtype))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:21].to(CUDA)
    found = []
    for choice in ("triton", "plain"):
        pools = [random(40, num_groups, size, dtype=dtype, seed=9) for _ in range(2)]
        with choose_kernels(choice):
            query = rotate_and_store(product, rotation, layout, pools[0], pools[1], slots)
            found.append([query, *pools, *split_heads(product, rotation, layout)])
    for ours, theirs in zip(*found, strict=True):
        check_near(ours, theirs, LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 40, 1500])
def test_products_of_experts(num_rows: int, dtype: torch.dtype) -> None:
    rows, weights = random(num_rows, 2048, dtype=dtype), random(128, 768, 2048, dtype=dtype, seed=1)
    chosen = torch.randint(0, 128, (num_rows,), generator=torch.Generator().manual_seed(2))
    ends = torch.bincount(chosen, minlength=128).cumsum(0).to(CUDA, torch.int32)
    with choose_kernels("triton"):
        got = multiply_by_expert(rows, weights, ends)
    with choose_kernels("plain"):
        check_near(got, multiply_by_expert(rows, weights, ends), LIMITS[dtype])


@pytest.mark.parametrize("architecture", FAST)
def test_greedy_tokens_in_float32(architecture: str) -> None:
    asked = prompts(4)
    expected = greedy(architecture, asked)
    target = target_of(tiny_model(architecture).to(CUDA))
    params = SamplingParams(max_tokens=24)
    tree = EngineSettings(controller="fixed", tree=TreeSettings(depth=4, width=3, budget=12))
    with choose_target_path("fast"):
        assert token_ids(Engine(target).generate(asked, params)) == expected
        head = Engine(target, tiny_head(target), tree)
        assert token_ids(head.generate(asked, params)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", FAST)
def test_documents(architecture: str, dtype: torch.dtype) -> None:
    """As near the truth as transformers, but where rounding sends tokens to other experts."""
    if "moe" in architecture and dtype == torch.bfloat16:
        pytest.skip("rounding chooses other experts")
    lengths = (23, 1, 9, 40)
    ids = (torch.arange(3, 3 + sum(lengths)) * 7 % 97).to(CUDA)
    read = {}
    for path in ("plain", "fast"):
        for precision in (torch.float32, dtype):
            target = target_of(tiny_model(architecture, dtype=precision).to(CUDA))
            with choose_target_path(path):
                reading = target.read(ids, make_documents(lengths, CUDA), (0, 2, 4))
            read[path, precision] = torch.cat([reading.features_TF, reading.final_TD], dim=1)
    truth = read["plain", torch.float32].double()
    error = {path: (read[path, dtype].double() - truth).norm() for path in ("plain", "fast")}
    assert error["fast"] <= 1.25 * error["plain"] + 1e-4 * truth.norm()


class Buffers:
    """Tensors of a pass that stay where they are while their contents change."""

    def __init__(self, target: Target, num_requests: int, chain: int) -> None:
        self.target, self.chain = target, chain
        size = num_requests * chain
        self.tokens = torch.zeros(size, dtype=torch.long, device=CUDA)
        self.context = torch.zeros(num_requests, dtype=torch.long, device=CUDA)
        self.chains = torch.full((num_requests,), chain, device=CUDA)
        windows = {layer.spec.window for layer in _layers(target)}
        table = torch.arange(num_requests * BLOCKS, device=CUDA).view(num_requests, BLOCKS)
        self.tables = BlockTables(BLOCK, dict.fromkeys(windows, table))
        self.memory = KVGroups(dict.fromkeys(windows, num_requests * BLOCKS * BLOCK))

    def packed(self) -> TreePass:
        return make_tree_pass(
            chain_tokens_C=self.tokens,
            chain_B=self.chains,
            context_B=self.context,
            trees=None,
            num_rows=len(self.tokens),
            tables=self.tables,
            num_short=len(self.context),
        )

    def run(self) -> Tensor:
        return self.target.forward(self.packed(), self.memory, taps=(2,)).logits_RV


def _layers(target: Target) -> list:
    fast = target._fast_decoder()
    assert fast is not None
    return fast._layers


@pytest.mark.parametrize("architecture", FAST)
def test_a_captured_pass_follows_its_inputs(architecture: str) -> None:
    target = target_of(tiny_model(architecture, dtype=torch.bfloat16).to(CUDA))
    with choose_target_path("fast"):
        buffers = Buffers(target, num_requests=3, chain=2)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                buffers.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = buffers.run()
        for step in range(4):
            buffers.tokens.copy_((torch.arange(6) * 11 + step * 7) % 90 + 3)
            buffers.context.copy_(torch.tensor([0, 4, 9]) + step * 2)
            graph.replay()
            got = captured.clone()
            check_near(got, buffers.run(), 1e-2)


def test_a_pass_does_not_wait_for_the_device() -> None:
    target = target_of(tiny_model("llama", dtype=torch.bfloat16).to(CUDA))
    with choose_target_path("fast"):
        buffers = Buffers(target, num_requests=2, chain=3)
        wanted = buffers.run().clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = buffers.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got, wanted)
