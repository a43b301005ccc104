"""Drafts that know the target's noise: more of them are right, and the texts are the same.

The pair is the one whose greedy drafts are all right, at a temperature where it wanders. Catches:
noise of another position, depth or request than the one that decides, in ordinary cycles or those
that run ahead; drafts that depend on noise where coins decide; greedy requests that pay for others.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.outputs import Completion
from fledge.engine import head_children
from fledge.engine.head_drafter import HeadDrafter
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.synthetic_walk import SyntheticWalk
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import token_ids
from tests.lossless.test_paged_engine import run_disturbed

TEMPERATURE = 0.06
SHAPES = {"chain": (4, 1, 4), "tree": (3, 3, 9)}
ASKED = [[CIRCLE[start]] * 3 for start in (0, 7, 15, 22)]
MIXES: tuple[dict[str, Any], ...] = (
    {"temperature": TEMPERATURE},
    {},
    {"temperature": TEMPERATURE, "top_p": 0.9},
    {"temperature": 2 * TEMPERATURE, "top_k": 2, "min_p": 0.01},
)


@pytest.fixture(scope="module")
def wandering(forced: tuple[Target, Eagle3Head]) -> tuple[Target, Eagle3Head]:
    """The head is made as sure of itself as the target is, or its guesses would mean little."""
    target, head = forced
    with torch.no_grad():
        head.lm_head.weight.mul_(2.0)
    return target, head


def settings_of(shape: str, **changes: Any) -> EngineSettings:
    depth, width, budget = SHAPES[shape]
    tree = TreeSettings(depth=depth, width=width, budget=budget)
    return EngineSettings(tree=tree, **{"copies": False, "graphs": "off", **changes})


def sampled(mixes: tuple[dict[str, Any], ...] = MIXES, seed: int = 0) -> list[SamplingParams]:
    """Seeds of 63 bits, since positions are added to what they are mixed to."""
    return [
        SamplingParams(
            max_tokens=40, ignore_eos=True, seed=2**63 - 9 + seed + i, **mixes[i % len(mixes)]
        )
        for i in range(len(ASKED))
    ]


def accept_length(answers: list[Completion]) -> float:
    stats = [one.stats for one in answers]
    return (sum(one.num_tokens for one in stats) - len(stats)) / sum(one.cycles for one in stats)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_more_drafts_are_right(wandering: tuple[Target, Eagle3Head], shape: str) -> None:
    target, head = wandering
    settings, lengths = settings_of(shape), list[float]()
    texts = [token_ids(Engine(target).generate(ASKED, sampled(MIXES[:1], seed))) for seed in (0, 4)]
    for has_noise in (False, True):
        drafter = HeadDrafter(head, target, settings, has_noise=has_noise)
        engine = Engine(target, settings=settings, drafter=drafter)
        answers = list[Completion]()
        for seed, wanted in zip((0, 4), texts, strict=True):
            answers += engine.generate(ASKED, sampled(MIXES[:1], seed))
            assert token_ids(answers[-len(ASKED) :]) == wanted
        lengths.append(accept_length(answers))
    assert lengths[1] > 1.07 * lengths[0]


@pytest.mark.parametrize("copies", [False, True], ids=["own", "copies"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_cycles_that_run_ahead_draft_the_same(
    wandering: tuple[Target, Eagle3Head], shape: str, copies: bool
) -> None:
    target, head = wandering
    wanted = token_ids(Engine(target).generate(ASKED, sampled()))
    usual = Engine(target, head, settings_of(shape, copies=copies))
    ahead = Engine(target, head, settings_of(shape, copies=copies, graphs="on"))
    theirs, ours = (engine.generate(ASKED, sampled()) for engine in (usual, ahead))
    assert token_ids(theirs) == token_ids(ours) == wanted
    for one, other in zip(theirs, ours, strict=True):
        assert one.stats.cycles == other.stats.cycles
        assert one.stats.offered_at_depth == other.stats.offered_at_depth
        assert one.stats.accepted_at_depth == other.stats.accepted_at_depth


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_kernels_draft_the_same(wandering: tuple[Target, Eagle3Head], shape: str) -> None:
    pytest.importorskip("triton")
    target, head = wandering
    params = [replace(one, max_tokens=9) for one in sampled()]
    engines = [Engine(target, head, settings_of(shape, graphs="on")) for _ in range(2)]
    theirs = engines[0].generate(ASKED, params)
    with choose_kernels("triton"):
        ours = engines[1].generate(ASKED, params)
    assert token_ids(ours) == token_ids(theirs)
    for one, other in zip(theirs, ours, strict=True):
        assert one.stats.accepted_at_depth == other.stats.accepted_at_depth


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_memory_and_company_change_no_text(
    wandering: tuple[Target, Eagle3Head], graphs: str
) -> None:
    """Shared prefixes, little memory, requests that are preempted, join and leave."""
    target, head = wandering
    asked, params = [*ASKED, *ASKED], [*sampled(), *sampled(seed=1)[:3], sampled(seed=2)[3]]
    wanted = [
        token_ids(Engine(target).generate([prompt], one))[0]
        for prompt, one in zip(asked, params, strict=True)
    ]
    settings = settings_of("tree", graphs=graphs, max_requests=3, block_size=4, cache_tokens=200)
    engine = Engine(target, head, settings)
    assert run_disturbed(engine, asked, params, seed=3) == wanted
    assert run_disturbed(engine, asked, params, seed=4, preempt_chance=0.0) == wanted


def test_only_where_the_noise_alone_decides(wandering: tuple[Target, Eagle3Head]) -> None:
    """Coins are fair to drafts that know nothing of them; drafts right by chance know nothing."""
    target, head = wandering
    settings = settings_of("tree")
    by_rejection = Engine(target, head, replace(settings, accept="rejection"))
    by_chance = Engine(target, head, settings, measured_with=SyntheticWalk(0.7))
    for engine, has_noise in (
        (by_rejection, False),
        (by_chance, False),
        (Engine(target, head), True),
    ):
        drafter = engine._drafter
        assert isinstance(drafter, HeadDrafter)
        assert drafter.has_noise is has_noise


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_greedy_requests_pay_nothing(
    wandering: tuple[Target, Eagle3Head], graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = list[int]()
    top_logprobs = head_children.top_logprobs

    def counted(logits_TV: torch.Tensor, num_best: int) -> Any:
        asked_for.append(num_best)
        return top_logprobs(logits_TV, num_best)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nobody samples")

    monkeypatch.setattr(head_children, "top_logprobs", counted)
    monkeypatch.setattr(head_children, "noised_top", never)
    target, head = wandering
    engine = Engine(target, head, settings_of("tree", graphs=graphs))
    engine.generate(ASKED, SamplingParams(max_tokens=12, ignore_eos=True))
    assert set(asked_for) == {3}
    with pytest.raises(AssertionError, match="nobody samples"):
        engine.generate(ASKED, sampled())
