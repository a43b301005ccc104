"""The whole engine through the kernels, in Triton's interpreter: the same tokens as without.

Windows, trees that are accepted and moved, a head that drafts over pages. The interpreter is slow,
so the answers are short.
"""

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.ops.kernel_choice import choose_kernels
from fledge.testing import tiny_head
from tests.lossless.support import greedy, pair, prompts, scripted, token_ids

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
SETTINGS = EngineSettings(
    max_requests=2,
    max_pass_tokens=16,
    controller="fixed",
    tree=TreeSettings(depth=2, width=2, budget=4),
)


@pytest.mark.slow
def test_drafts_of_a_script() -> None:
    asked = prompts(1)
    expected = greedy("gemma3-hybrid", asked, max_tokens=5)
    _, target = pair("gemma3-hybrid")
    drafter = scripted(asked, expected, accuracy=0.9)
    with choose_kernels("triton"):
        engine = Engine(target, drafter=drafter, settings=SETTINGS)
        (answer,) = engine.generate(asked, SamplingParams(max_tokens=5))
    assert token_ids([answer]) == expected
    assert answer.stats.accept_length > 1, "nothing was accepted"


def test_drafts_of_a_head() -> None:
    asked = prompts(1)
    expected = greedy("llama", asked, max_tokens=3)
    _, target = pair("llama")
    with choose_kernels("triton"):
        engine = Engine(target, tiny_head(target), SETTINGS)
        answers = engine.generate(asked, SamplingParams(max_tokens=3))
    assert token_ids(answers) == expected


@pytest.mark.slow
def test_prompts_that_join_a_batch() -> None:
    """Passes that are filled up, and prompts that bring no rows."""
    _, target = pair("llama")
    tree = TreeSettings(depth=2, width=2, budget=3)
    settings = EngineSettings(graphs="on", tree=tree, max_requests=4, max_pass_tokens=64)
    asked = [[5, 6, 7], [8] * 20, [9, 10], [11] * 33]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (6, 3, 1, 5)]
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    running = []
    with choose_kernels("triton"):
        engine = Engine(target, tiny_head(target, draft_vocab_size=97), settings)
        for prompt, wanted in zip(asked, params, strict=True):
            running.append(engine.add(engine.make_request(prompt, wanted)))
            engine.step()
            engine.step()
        while engine.has_work:
            engine.step()
    assert [seq.output_ids for seq in running] == token_ids(plain)
