"""The same promises on a CUDA device.

In float32 with TF32 off the GPU says what the CPU says; bfloat16 is measured by
tools/measure_near_ties.py, since there only near-ties may differ.
"""

from collections.abc import Iterator

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.ops.noise import gumbel, uniform_bits
from fledge.testing import ARCHITECTURES, target_of, tiny_head, tiny_model
from tests.lossless.support import greedy, prompts, scripted, token_ids
from tests.lossless.test_paged_engine import SETTINGS, branching_prompts, run_disturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
TREE = EngineSettings(tree=TreeSettings(depth=4, width=3, budget=12))


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_float32_equals_transformers_on_the_cpu(architecture: str) -> None:
    asked = prompts(4)
    expected = greedy(architecture, asked)
    target = target_of(tiny_model(architecture).to(CUDA))
    params = SamplingParams(max_tokens=24)
    assert token_ids(Engine(target).generate(asked, params)) == expected
    assert token_ids(Engine(target, tiny_head(target), TREE).generate(asked, params)) == expected
    drafter = scripted(asked, expected, device=CUDA)
    assert token_ids(Engine(target, drafter=drafter).generate(asked, params)) == expected


def test_noise_has_the_same_bits_on_both_devices() -> None:
    seeds, positions = torch.tensor([0, 7, 2**63 - 1]), torch.tensor([0, 1, 10**6])
    on_cpu = uniform_bits(seeds, positions, 50_000)
    on_gpu = uniform_bits(seeds.to(CUDA), positions.to(CUDA), 50_000)
    assert torch.equal(on_cpu, on_gpu.cpu())
    noise = gumbel(seeds.to(CUDA), positions.to(CUDA), 50_000).cpu()
    torch.testing.assert_close(gumbel(seeds, positions, 50_000), noise, rtol=1e-12, atol=1e-12)


def test_sampled_text_is_the_same_on_both_devices_and_with_drafts() -> None:
    asked = prompts(4)
    params = [SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=i) for i in range(4)]
    model = tiny_model("gemma3-hybrid")
    on_cpu = token_ids(Engine(target_of(model)).generate(asked, params))
    target = target_of(model.to(CUDA))
    assert token_ids(Engine(target).generate(asked, params)) == on_cpu
    assert token_ids(Engine(target, tiny_head(target), TREE).generate(asked, params)) == on_cpu
    drafter = scripted(asked, on_cpu, device=CUDA)
    assert token_ids(Engine(target, drafter=drafter).generate(asked, params)) == on_cpu


@pytest.mark.parametrize("rule", ["gumbel", "rejection"])
def test_bfloat16_runs(rule: str) -> None:
    target = target_of(tiny_model("olmo3-hybrid", dtype=torch.bfloat16).to(CUDA))
    settings = EngineSettings(accept=rule, tree=TREE.tree)
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=1)
    completions = Engine(target, tiny_head(target), settings).generate(prompts(4), params)
    assert all(len(c.token_ids) == 20 or c.finish_reason == "stop" for c in completions)


@pytest.mark.parametrize("setting", ["chunked", "starved"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "mistral-sliding"])
def test_chunks_prefix_hits_and_preemption(architecture: str, setting: str) -> None:
    asked = branching_prompts(12)
    expected = greedy(architecture, asked, max_tokens=20)
    target = target_of(tiny_model(architecture).to(CUDA))
    params = [SamplingParams(max_tokens=20)] * len(asked)
    for drafts in (
        {"head": tiny_head(target, sliding_window=6 if "gemma" in architecture else None)},
        {"drafter": scripted(asked, expected, device=CUDA)},
    ):
        engine = Engine(target, settings=SETTINGS[setting], **drafts)
        assert run_disturbed(engine, asked, params, seed=1) == expected
        assert run_disturbed(engine, asked, params, seed=2) == expected
        assert engine.stats.num_reused_tokens > 0
        assert engine.stats.num_preemptions > 0


def test_penalties_and_logprobs_on_the_gpu() -> None:
    asked = prompts(4)
    model = tiny_model("llama")
    params = [
        SamplingParams(max_tokens=16, repetition_penalty=1.4, logprobs=3),
        SamplingParams(max_tokens=16, temperature=0.9, seed=3, presence_penalty=0.6),
        SamplingParams(max_tokens=16, frequency_penalty=0.5, min_tokens=12, logit_bias={7: 2.0}),
        SamplingParams(max_tokens=16),
    ]
    on_cpu = Engine(target_of(model)).generate(asked, params)
    target = target_of(model.to(CUDA))
    on_gpu = Engine(target, tiny_head(target), TREE).generate(asked, params)
    assert token_ids(on_gpu) == token_ids(on_cpu)
    for ours, theirs in zip(on_gpu[0].logprobs or (), on_cpu[0].logprobs or (), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
