"""A head's fast steps in Triton's interpreter against `Eagle3Head`, and levels of drafts.

Catches: halves of the input exchanged, the wrong hidden state picked, a residual that should be
normed or should not be, biases and norms of queries forgotten, a rotation's scale left out, output
of the wrong rows, a second copy of weights, weights that were loaded later and not seen, and levels
of trees that are scored or chosen otherwise than by plain operations.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.models.attention import attend_packed
from fledge.models.fast_head import FastHead, HeadStep, has_fast_steps
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.ops.attention import AttentionSpec
from fledge.ops.draft_level import Frontier, Level, Maps, Proposal, score_level
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.top_logprobs import TopLogprobs

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
HEADS: dict[str, dict[str, Any]] = {
    "usual": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True, "norm_before_fc": True},
    "biases": {"attention_bias": True, "output_bias": True},
    "norms of queries": {"qk_norm": True, "head_dim": 12},
    "more heads": {"num_heads": 10, "num_kv_heads": 5},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "yarn rope, a window": {"rope_scaling": YARN, "sliding_window": 3},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_head(**flags: Any) -> Eagle3Head:
    sizes = {"intermediate_size": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    head = Eagle3Head(
        HeadConfig(
            hidden_size=24,
            target_hidden_size=24,
            vocab_size=40,
            draft_vocab_size=16,
            **{**sizes, **flags},
        )
    )
    with torch.no_grad():
        for seed, parameter in enumerate(head.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed) / 3)
    return head.eval()


def make_pass(device: torch.device) -> TreePass:
    """Five rows of one request behind two cached tokens, three of another behind none."""
    tables = BlockTables(4, {window: torch.tensor([[3, 1], [0, 2]]) for window in (None, 3)})
    return make_tree_pass(
        chain_tokens_C=torch.tensor([7, 3, 3, 39, 0, 5, 6, 1]),
        chain_B=torch.tensor([5, 3]),
        context_B=torch.tensor([2, 0]),
        trees=None,
        num_rows=8,
        tables=tables,
        num_short=2,
    )


def run_both(head: Eagle3Head, fast: FastHead | None = None) -> FastHead:
    """The same step both ways, by a fast head that is there already or a new one."""
    window = head.config.sliding_window
    spec = AttentionSpec(scale=0.3, window=window)
    embedding, hidden = random(40, 24, seed=91), random(11, 24, seed=92)
    rows, asked = torch.tensor([10, 0, 3, 3, 7, 1, 2, 9]), torch.tensor([7, 4])
    pools = KVPool(16), KVPool(16)
    packed = make_pass(CPU)
    kv = (head.config.num_kv_heads, head.config.head_dim)
    for pool in pools:
        for held in pool.hold(0, hidden, kv, kv):
            held.copy_(random(*held.shape, seed=93))

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend_packed(packed, pools[0], 0, query, keys, values, spec)

    embeds = head.embed(packed.token_ids_T, embedding)
    with choose_kernels("plain"):
        wanted = head(embeds, hidden[rows], packed.positions_T, attend)
    fast = fast or FastHead(head, embedding, spec, num_positions=16, layer=0)
    with choose_kernels("triton"):
        rotation = fast.rotation(packed.positions_T)
        assert fast.rotation(packed.positions_T.view(1, -1)[:0]).shape == (0, *rotation.shape)
        got = fast.run(HeadStep(packed, hidden, rows, rotation, asked), pools[1])
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs[asked], rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(pools[1].layer(0), pools[0].layer(0), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    return fast


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_steps_are_the_twins(name: str) -> None:
    head = make_head(**HEADS[name])
    if name == "EAGLE-3.1":
        head.own_embedding = random(40, 24, seed=17)
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    run_both(head)
    for key, weight in head.state_dict().items():
        assert torch.equal(weight, before[key])
    attention = head.midlayer.self_attn
    one, other = attention.q_proj.weight, attention.v_proj.weight
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@torch.no_grad()
def test_weights_loaded_later_are_seen() -> None:
    head, other = make_head(qk_norm=True), make_head(qk_norm=True)
    for weight in other.parameters():
        weight.add_(0.1)
    fast = run_both(head)
    head.load_state_dict(other.state_dict())
    assert run_both(head, fast) is fast, "the one that was made of the weights before"


def test_a_cpu_stays_with_the_twin() -> None:
    head = make_head()
    assert not has_fast_steps(head)
    with choose_kernels("triton"):
        assert has_fast_steps(head)
        assert not has_fast_steps(head.double())


def proposal(rows: int, width: int, seed: int) -> Proposal:
    logprobs = (random(rows, width, seed=seed) * 3 - 2).sort(descending=True).values
    # Ties, what is no number, what rounding lifted above certainty, what is impossible.
    logprobs[0] = -1.0
    logprobs[-1, 0], logprobs[-1, -1] = 0.001, float("nan")
    knots = torch.linspace(-4, 0, 5)
    offsets = -random(2, 1, 6, seed=1).abs()
    slopes = random(2, 1, 6, seed=2).abs()
    maps = Maps(knots, torch.cat([offsets, slopes], dim=1))
    indices = torch.randint(0, 16, (rows, width), generator=torch.Generator().manual_seed(seed))
    sampled = torch.tensor([False, True, False])

    def calibrate(given_BC: Tensor) -> Tensor:
        lines_B2S = maps.lines_M2S[sampled.long()]
        piece = torch.bucketize(given_BC, knots)
        offset, slope = (line.gather(1, piece) for line in lines_B2S.unbind(1))
        return torch.addcmul(offset, slope, given_BC).clamp(max=0.0)

    to_target = torch.arange(16) * 5
    return Proposal(TopLogprobs(logprobs, indices), to_target, sampled, maps, calibrate)


def check_same(ours: Level, theirs: Level) -> Frontier:
    for one, other in zip(
        (*ours[:4], *ours.frontier), (*theirs[:4], *theirs.frontier), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    return theirs.frontier


@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_levels_are_scored_as_by_plain_operations(width: int) -> None:
    above, num_before = None, 0
    for depth in range(4):
        given = proposal(3 if above is None else 3 * width, width, seed=depth)
        wanted = score_level(given, above, num_before)
        with choose_kernels("triton"):
            got = score_level(given, above, num_before)
        above = check_same(got, wanted)
        num_before += width if depth == 0 else width * width
    assert above is not None
    assert above.visible_BWS.shape == (3, width, 4 * width)
