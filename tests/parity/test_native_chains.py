"""What the cycles of a CPU are made of against its twins: best tokens, and chains of drafts."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.models.head import Eagle3Head
from fledge.models.native_drafts import ChainDrafts
from fledge.models.native_head import SharpenedLogits
from fledge.models.target import Target
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.native_chains import TokenChain
from fledge.ops.native_library import native_library
from fledge.ops.native_product import Format, NativeMatrix
from fledge.ops.native_walk import Draw
from fledge.ops.paged import make_tree_pass
from fledge.ops.tree import TreeBatch
from fledge.store.compiler import find_compiler
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.support import prompts

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
DEPTH = 5


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    with choose_kernels("native"):
        yield


def _four_bits(head: Eagle3Head, *, has_whole_rows: bool = False) -> Eagle3Head:
    """Weights that rounding to 4 bits leaves as they are, so that both ways draft the same."""
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if has_whole_rows and name.startswith("lm_head"):
                continue
            if weight.dim() == 2 and weight.shape[1] % 32 == 0:
                codes = (weight * 8).round().clamp(-8, 7).view(-1, 32)
                codes[:, 0], codes[:, 1] = -8, 7
                weight.copy_((codes / 8).view_as(weight))
    return head


def _begun(
    target: Target,
    count: int,
    kinds: list[SamplingParams] | None = None,
    *,
    has_whole_rows: bool = False,
    **flags: int,
) -> tuple[Engine, list[Sequence]]:
    """An engine with some requests that have said a few tokens."""
    tree = TreeSettings(depth=DEPTH, width=1, budget=DEPTH)
    settings = EngineSettings(controller="fixed", tree=tree, block_size=4)
    head = _four_bits(tiny_head(target, **flags), has_whole_rows=has_whole_rows)
    engine = Engine(target, head, settings)
    asked = zip(prompts(count), kinds or [SamplingParams(max_tokens=60)] * count, strict=True)
    sequences = [engine.add(engine.make_request(ids, params)) for ids, params in asked]
    while not all(len(seq.output_ids) > 4 for seq in sequences):
        engine.step()
    assert all(seq.row >= 0 for seq in sequences)
    for seq in sequences:
        assert engine._cache.reserve(seq, seq.len + DEPTH)
    return engine, sequences


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3-hybrid"])
@pytest.mark.parametrize("count", [1, 3])
def test_best_tokens_are_those_of_the_logits(architecture: str, count: int) -> None:
    """Of embeddings that a pass looks up itself, and of those that their family scales."""
    target = target_of(tiny_model(architecture))
    engine, sequences = _begun(target, count)
    passes = engine._cycle.host._passes
    assert passes is not None
    chains = [
        TokenChain(seq.row, seq.kv_len, [seq.newest_token_id, 7, 11 + place])
        for place, seq in enumerate(sequences)
    ]
    best = passes.run(chains)
    features = passes.features_XF[: 3 * count].clone()
    packed = make_tree_pass(
        chain_tokens_C=torch.tensor([token for one in chains for token in one.token_ids]),
        chain_B=torch.full((count,), 3),
        context_B=torch.tensor([seq.kv_len for seq in sequences]),
        trees=None,
        num_rows=3 * count,
        tables=engine._cache.tables(sequences),
        num_short=count,
    )
    output = target.forward(packed, engine._cache.target_memory, taps=engine._drafter.taps)
    assert best == output.logits_RV.argmax(dim=-1).tolist()
    assert output.features_TF is not None
    assert torch.equal(features, output.features_TF)
    assert not passes._stream_TD.requires_grad, "a graph would grow with every pass"


def test_best_tokens_of_screened_logits_are_those_of_all() -> None:
    """Output rows of eight bits, of whose logits few are made in full."""
    model = tiny_model("llama", seed=1, vocab_size=512)
    rows = model.get_output_embeddings().weight
    with torch.no_grad():
        codes = (rows.view(-1, 32) * 2000).round().clamp(-127, 127)
        codes[:, 0] = 127
        rows.copy_((codes / 1024).view_as(rows))
    engine, sequences = _begun(target_of(model), 3)
    passes = engine._cycle.host._passes
    assert passes is not None
    head = passes._native._head
    assert Format(head.pieces[0].format) is Format.EIGHT_HALF
    assert head.lengths
    chains = [
        TokenChain(seq.row, seq.kv_len, [seq.newest_token_id, 7, 11 + place])
        for place, seq in enumerate(sequences)
    ]
    best = passes.run(chains)
    logits_TV = passes._final_TD[:9] @ rows.detach().t()
    top_T2 = logits_TV.topk(2).values
    assert float((top_T2[:, 0] - top_T2[:, 1]).min()) > 1e-4, "rounding could decide"
    assert best == logits_TV.argmax(dim=-1).tolist()
    assert best == [passes.run([one])[row] for one in chains for row in range(3)]


class _Drafts:
    """Drafts behind the same tokens, made natively and by the twin."""

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        host, drafter = engine._cycle.host, engine._drafter
        assert isinstance(drafter, HeadDrafter)
        assert host._drafts is not None
        host.leave()
        self.native, self.head = host._drafts.native, drafter.head
        self._twin, self._sequences = drafter, sequences
        self._before = [seq.head_len for seq in sequences]

    def ours(self, draws: list[Draw] | None = None, *, least: float = 0.0) -> ChainDrafts:
        self._unread()
        chains = [
            TokenChain(
                seq.row, seq.head_len, seq.token_ids[seq.head_len :], self._twin.first_key(seq)
            )
            for seq in self._sequences
        ]
        return self.native.draft(chains, [], depth=DEPTH, least=least, draws=draws)

    def theirs(self) -> TreeBatch:
        self._unread()
        with choose_kernels("plain"):
            plan = DraftPlan(DEPTH, 1, DEPTH * len(self._sequences))
            return self._twin.draft(self._sequences, plan)

    def _unread(self) -> None:
        for seq, head_len in zip(self._sequences, self._before, strict=True):
            seq.head_len = head_len


@pytest.mark.parametrize("count", [1, 3])
def test_chains_are_those_of_the_twin(count: int) -> None:
    drafts = _Drafts(*_begun(target_of(tiny_model("llama-tied")), count))
    ours, trees = drafts.ours(), drafts.theirs()
    assert ours.token_ids == trees.tokens_BN[:, 1:].tolist()
    theirs = trees.logprobs_BN[:, 1:].exp()
    found = torch.tensor(ours.probabilities)
    torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-4)
    # A chain that is not probable enough ends early, with the same drafts up to there.
    short = drafts.ours(least=float(theirs[:, 0].max()) * 1.01)
    assert short.token_ids == [chain[:1] for chain in ours.token_ids]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 4), (6, 3), (4, 1)])
def test_chains_of_heads_with_attention_of_another_width(num_heads: int, num_kv_heads: int) -> None:
    """Wider than the target's, narrower, and with another group; columns that are not packed."""
    target = target_of(tiny_model("llama-tied"))
    begun = _begun(target, 3, num_heads=num_heads, num_kv_heads=num_kv_heads)
    drafts = _Drafts(*begun)
    ours, trees = drafts.ours(), drafts.theirs()
    assert ours.token_ids == trees.tokens_BN[:, 1:].tolist()
    theirs = trees.logprobs_BN[:, 1:].exp()
    torch.testing.assert_close(torch.tensor(ours.probabilities), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("has_been_told", [True, False])
def test_weights_that_are_loaded_later_are_drafted_with(has_been_told: bool) -> None:
    """Whoever looks for them, or another pass of the head that has packed them on its own."""
    drafts = _Drafts(*_begun(target_of(tiny_model("llama-tied")), 2))
    before, native = drafts.ours(), drafts.native
    with torch.no_grad():
        rows_VD = drafts.head.lm_head.weight
        rows_VD.copy_(rows_VD.roll(1, dims=0))
    if has_been_told:
        native.refresh()
    else:
        native._head.refresh()
    ours, trees = drafts.ours(), drafts.theirs()
    assert ours.token_ids == trees.tokens_BN[:, 1:].tolist()
    assert ours.token_ids != before.token_ids


def test_rounded_rows_do_not_decide_between_tokens_that_are_nearly_equal() -> None:
    """Rows that 4 bits do not hold: what is drafted is what whole rows would draft."""
    target = target_of(tiny_model("llama-tied"))
    drafts = _Drafts(*_begun(target, 8, has_whole_rows=True))
    ours, trees = drafts.ours(), drafts.theirs()
    assert ours.token_ids == trees.tokens_BN[:, 1:].tolist()
    found = torch.tensor(ours.probabilities)
    torch.testing.assert_close(found, trees.logprobs_BN[:, 1:].exp(), rtol=0.2, atol=0.02)


def test_the_highest_logits_are_made_of_whole_rows() -> None:
    library = native_library()
    generator = torch.Generator().manual_seed(3)
    rows_VD = torch.randn(96, 64, generator=generator)
    normed_TD = 0.3 * torch.randn(40, 64, generator=generator)
    matrix = NativeMatrix(library, rows_VD, rounded=Format.FOUR_HALF)
    rounded_TV, exact_TV = matrix(normed_TD), normed_TD @ rows_VD.T
    found_TV = SharpenedLogits(matrix, rows_VD)(normed_TD)
    place_T = rounded_TV.sort(dim=1, descending=True).indices.argsort(dim=1)
    is_near_TV = (rounded_TV >= rounded_TV.amax(dim=1, keepdim=True) - 3.0) & (place_T < 8)
    is_alone_T1 = is_near_TV.sum(dim=1, keepdim=True) == 1
    assert 0 < is_alone_T1.sum() < len(normed_TD)
    wanted_TV = torch.where(is_near_TV & ~is_alone_T1, exact_TV, rounded_TV)
    torch.testing.assert_close(found_TV, wanted_TV, rtol=1e-5, atol=1e-5)
    assert (found_TV - exact_TV).abs().max() > 0.01, "4 bits do not hold these rows"


SAMPLED = [
    SamplingParams(max_tokens=60, temperature=1.0, seed=4),
    SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=2**63 - 1),
    SamplingParams(max_tokens=60),
    SamplingParams(max_tokens=60, temperature=1.3, top_k=5, top_p=0.8, min_p=0.05, seed=1),
    SamplingParams(max_tokens=60, temperature=1e-30, min_p=0.3, seed=9),
    SamplingParams(max_tokens=60, temperature=2.0, top_k=1, seed=6),
]


@pytest.mark.parametrize("seed", range(3))
def test_chains_under_noise_are_those_of_the_twin(seed: int) -> None:
    """Drafts, and how probable they are said to be: greedy requests beside sampled ones."""
    kinds = [replace(one, seed=one.seed ^ seed) for one in SAMPLED]
    engine, sequences = _begun(target_of(tiny_model("llama-tied")), len(kinds), kinds)
    drafts = _Drafts(engine, sequences)
    draws = [Draw(seq.request.params, len(seq.output_ids)) for seq in sequences]
    ours, trees = drafts.ours(draws), drafts.theirs()
    assert ours.token_ids == trees.tokens_BN[:, 1:].tolist()
    probabilities = torch.tensor(ours.probabilities).cumprod(dim=1)
    wanted = trees.logprobs_BN[:, 1:].exp().cumprod(dim=1)
    torch.testing.assert_close(probabilities, wanted, rtol=1e-3, atol=1e-4)
    assert drafts.ours().token_ids != ours.token_ids, "without noise others are drafted"
