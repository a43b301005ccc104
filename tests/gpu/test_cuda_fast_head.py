"""A head's fast steps on a GPU: as near the truth as `Eagle3Head`, and captured like any pass.

Shapes are those of real heads: of a target with 135M parameters, and of one with 8B.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.models.attention import attend_packed
from fledge.models.fast_head import FastHead, HeadStep
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import fit_to_target
from fledge.ops.attention import AttentionSpec
from fledge.ops.draft_level import Frontier, Maps, Proposal, score_level
from fledge.ops.head_input import join_inputs
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.norms import Norm
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.top_logprobs import TopLogprobs
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.support import prompts, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
    },
    "135M, twice the heads": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 18,
        "num_kv_heads": 6,
        "head_dim": 64,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
}
FLAGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "normed": {"norm_before_residual": True, "norm_output": True},
    "biases and norms": {"attention_bias": True, "output_bias": True, "qk_norm": True},
}
BLOCK, BLOCKS, NUM_REQUESTS, CHAIN = 16, 4, 3, 4


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_head(shape: str, flags: str, dtype: torch.dtype) -> Eagle3Head:
    sizes = SHAPES[shape]
    vocabulary = {"vocab_size": 512, "draft_vocab_size": 256}
    width = {"target_hidden_size": sizes["hidden_size"]}
    # Made on the device: the host takes seconds for so many random numbers.
    with CUDA:
        head = Eagle3Head(HeadConfig(**sizes, **vocabulary, **width, **FLAGS[flags]))
    return head.to(dtype).requires_grad_(False).eval()


class Step:
    """One step of a head over buffers that stay where they are while their contents change."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head, weight, size = head, head.lm_head.weight, head.config.hidden_size
        self.spec = AttentionSpec(scale=head.config.head_dim**-0.5)
        num_rows = NUM_REQUESTS * CHAIN
        self.embedding, self.hidden = weight.new_empty(512, size), weight.new_empty(20, size)
        self.tokens, self.rows = torch.zeros(2, num_rows, dtype=torch.long, device=CUDA)
        self.context = torch.zeros(NUM_REQUESTS, dtype=torch.long, device=CUDA)
        self.chains = torch.full((NUM_REQUESTS,), CHAIN, device=CUDA)
        self.asked = torch.tensor([2, 7, 11], device=CUDA)
        table = torch.arange(NUM_REQUESTS * BLOCKS, device=CUDA).view(NUM_REQUESTS, BLOCKS)
        self.tables = BlockTables(BLOCK, {None: table})
        self.memory = KVPool(NUM_REQUESTS * BLOCKS * BLOCK)
        kv = (head.config.num_kv_heads, head.config.head_dim)
        self.kept = self.memory.hold(0, weight, kv, kv)
        self.refill(0)
        self.fast = FastHead(head, self.embedding, self.spec, num_positions=128, layer=0)

    def refill(self, seed: int) -> None:
        draw = torch.Generator(device=CUDA).manual_seed(seed)
        for one in (self.embedding, self.hidden, *self.kept):
            one.copy_(torch.randn(one.shape, generator=draw, device=CUDA))
        self.tokens.random_(512, generator=draw)
        self.rows.random_(20, generator=draw)
        self.context.random_(40, generator=draw)

    def packed(self) -> TreePass:
        return make_tree_pass(
            chain_tokens_C=self.tokens,
            chain_B=self.chains,
            context_B=self.context,
            trees=None,
            num_rows=len(self.tokens),
            tables=self.tables,
            num_short=NUM_REQUESTS,
        )

    def run(self) -> Tensor:
        packed = self.packed()
        rotation = self.fast.rotation(packed.positions_T)
        step = HeadStep(packed, self.hidden, self.rows, rotation, self.asked)
        return torch.cat(self.fast.run(step, self.memory))

    def run_twin(self, head: Eagle3Head) -> Tensor:
        packed, dtype = self.packed(), head.lm_head.weight.dtype
        memory = KVPool(self.memory.num_slots)
        for mine, theirs in zip(
            memory.hold(0, head.lm_head.weight, *(one.shape[1:] for one in self.kept)),
            self.kept,
            strict=True,
        ):
            mine.copy_(theirs)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_packed(packed, memory, 0, query, keys, values, self.spec)

        embeds = head.embed(packed.token_ids_T, self.embedding.to(dtype))
        with choose_kernels("plain"):
            hidden = self.hidden[self.rows].to(dtype)
            output = head(embeds, hidden, packed.positions_T, attend)
        return torch.cat([one[self.asked] for one in output])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_steps_are_as_near_the_truth(shape: str, flags: str, dtype: torch.dtype) -> None:
    head = make_head(shape, flags, dtype)
    step = Step(head)
    exact = make_head(shape, flags, torch.float64)
    exact.load_state_dict({name: one.double() for name, one in head.state_dict().items()})
    truth, twin = step.run_twin(exact), step.run_twin(head).double()
    ours = step.run().double()
    error = (ours - truth).norm()
    assert error <= 1.25 * (twin - truth).norm() + 1e-5 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_captured_step_follows_its_inputs_and_weights(dtype: torch.dtype) -> None:
    head = make_head("135M", "biases and norms", dtype)
    step = Step(head)
    for _ in range(2):
        step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    for seed in range(1, 4):
        step.refill(seed)
        for weight in head.parameters():
            weight.add_(0.01)
        graph.replay()
        wanted = step.run_twin(head).double()
        difference = (captured.double() - wanted).norm() / wanted.norm()
        assert difference <= (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "keeps_normed"), [(576, False), (4096, True), (5120, False)])
def test_inputs(size: int, keeps_normed: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator(device=CUDA).manual_seed(size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=CUDA).to(dtype)

    embedding, hidden = random(300, size), random(50, size)
    norms = (Norm(random(size), 1e-5, "cast_first"), Norm(random(size), 1e-5, "cast_first"))
    tokens = torch.randint(0, 300, (77,), generator=draw, device=CUDA)
    rows = torch.randint(0, 50, (77,), generator=draw, device=CUDA)
    with choose_kernels("plain"):
        wanted = join_inputs(tokens, embedding, hidden, rows, norms, keeps_normed=keeps_normed)
    with choose_kernels("triton"):
        got = join_inputs(tokens, embedding, hidden, rows, norms, keeps_normed=keeps_normed)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("width", [1, 2, 5, 8, 32])
def test_levels(width: int) -> None:
    num_requests, above, num_before = 5, None, 0
    draw = torch.Generator(device=CUDA).manual_seed(width)
    lines = torch.rand(2, 2, 21, generator=draw, device=CUDA)
    lines[:, 0] *= -1
    maps = Maps(torch.linspace(-9, 0, 20, device=CUDA), lines)
    sampled = torch.arange(num_requests, device=CUDA) % 2 == 1

    def calibrate(given_BC: Tensor) -> Tensor:
        piece = torch.bucketize(given_BC, maps.knots_K)
        offset, slope = (one.gather(1, piece) for one in lines[sampled.long()].unbind(1))
        return torch.addcmul(offset, slope, given_BC).clamp(max=0.0)

    for depth in range(4):
        rows = num_requests * (1 if depth == 0 else width)
        logprobs = -torch.rand(rows, width, generator=draw, device=CUDA).mul(9)
        indices = torch.randint(0, 100, (rows, width), generator=draw, device=CUDA)
        top = TopLogprobs(logprobs, indices)
        given = Proposal(top, torch.arange(100, device=CUDA) * 3, sampled, maps, calibrate)
        with choose_kernels("plain"):
            wanted = score_level(given, above, num_before)
        with choose_kernels("triton"):
            got = score_level(given, above, num_before)
        for one, other in zip(
            (*got[:4], *got.frontier), (*wanted[:4], *wanted.frontier), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        above = Frontier(*wanted.frontier)
        num_before += wanted.tokens_BC.shape[1]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_an_engine_answers_as_without_drafts(architecture: str, width: int) -> None:
    target = target_of(tiny_model(architecture).to(CUDA))
    tree = TreeSettings(depth=4, width=width, budget=4 * width)
    settings = EngineSettings(tree=tree, graphs="on")
    params = SamplingParams(max_tokens=40)
    plain = Engine(target, settings=settings).generate(prompts(), params)
    engine = Engine(target, tiny_head(target, draft_vocab_size=97), settings)
    assert token_ids(engine.generate(prompts(), params)) == token_ids(plain)


def test_a_head_with_turned_rows_drafts_all_of_its_tokens() -> None:
    target = target_of(tiny_model("llama").to(CUDA))
    head = tiny_head(target, draft_vocab_size=97, turned_rows=True).cpu()
    head.common_V = torch.arange(97) < 20
    served = fit_to_target(head, target)
    assert served.lm_head.weight.device.type == CUDA.type
    assert torch.equal(served.draft_to_target_V.cpu(), head.draft_to_target_V)
    settings = EngineSettings(tree=TreeSettings(depth=4, width=4, budget=16), graphs="on")
    params = SamplingParams(max_tokens=40)
    plain = Engine(target, settings=settings).generate(prompts(), params)
    engine = Engine(target, head, settings)
    assert token_ids(engine.generate(prompts(), params)) == token_ids(plain)
    assert engine.stats.offered_at_depth[0] > 0
