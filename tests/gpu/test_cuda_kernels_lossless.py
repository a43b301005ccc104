"""The whole engine on a GPU with every kernel, those that must be asked for too.

float32 with TF32 off: the tokens of transformers on the CPU, with and without drafts, greedy and
sampled; and the same with the plain twins.
"""

from collections.abc import Iterator

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.ops.kernel_choice import KernelChoice, choose_kernels
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.support import greedy, prompts, scripted, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
TREE = EngineSettings(controller="fixed", tree=TreeSettings(depth=4, width=3, budget=12))


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("choice", ["triton", "plain"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_greedy_tokens(architecture: str, choice: KernelChoice) -> None:
    asked = prompts(4)
    expected = greedy(architecture, asked)
    target = target_of(tiny_model(architecture).to(CUDA))
    params = SamplingParams(max_tokens=24)
    with choose_kernels(choice):
        assert token_ids(Engine(target).generate(asked, params)) == expected
        head = Engine(target, tiny_head(target), TREE)
        assert token_ids(head.generate(asked, params)) == expected
        drafter = scripted(asked, expected, device=CUDA)
        script = Engine(target, drafter=drafter, settings=TREE)
        assert token_ids(script.generate(asked, params)) == expected


def test_sampled_tokens() -> None:
    asked = prompts(4)
    params = [SamplingParams(max_tokens=20, temperature=0.8, seed=i) for i in range(4)]
    model = tiny_model("llama")
    expected = token_ids(Engine(target_of(model)).generate(asked, params))
    target = target_of(model.to(CUDA))
    with choose_kernels("triton"):
        engine = Engine(target, tiny_head(target), TREE)
        assert token_ids(engine.generate(asked, params)) == expected
