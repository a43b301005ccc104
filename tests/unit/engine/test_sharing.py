"""Several callers, one engine: each gets its own answer, whole, whoever turned the crank.

Catches answers lost because another caller's step finished them, answers counted twice, and a head
that is changed under the hands of the engine that uses it.
"""

import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fledge import Engine, SamplingParams
from fledge.contracts.errors import RequestError
from fledge.models.target import Target
from fledge.testing import ScriptedDrafter, draw_wide, target_of, tiny_head, tiny_model
from tests.warm_programs import WarmPrograms


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model())


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def _alone(target: Target, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    return Engine(target).generate([prompt], _params(max_tokens))[0].token_ids


def test_a_stream_survives_another_stream_read_to_its_end(target: Target) -> None:
    engine = Engine(target)
    first = engine.stream([5], _params(3))
    chunks = [next(first)]
    second = list(engine.stream([7], _params(10)))
    chunks += first
    assert sum((chunk.token_ids for chunk in chunks), ()) == _alone(target, [5], 3)
    assert sum((chunk.token_ids for chunk in second), ()) == _alone(target, [7], 10)
    assert chunks[-1].completion is not None
    assert not engine.has_work


def test_generate_beside_a_running_stream(target: Target) -> None:
    engine = Engine(target)
    stream = engine.stream([5], _params(4))
    next(stream)
    completion = engine.generate([[7]], _params(9))[0]
    assert completion.token_ids == _alone(target, [7], 9)
    assert list(stream)[-1].completion.token_ids == _alone(target, [5], 4)


def test_a_head_may_serve_two_engines_of_different_precision(target: Target) -> None:
    head = tiny_head(target)
    engine = Engine(target, head)
    Engine(target_of(tiny_model(dtype=torch.bfloat16)), head)
    assert head.fc.weight.dtype == torch.float32
    assert engine.generate([[5, 6]], _params(4))[0].token_ids == _alone(target, [5, 6], 4)


def test_drafts_beyond_the_context_of_learned_positions() -> None:
    """A table of positions ends with the context; drafted nodes may lie behind it."""
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "opt", vocab_size=97, word_embed_proj_dim=32, max_position_embeddings=20, **sizes
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    draw_wide(model, seed=0)
    target = target_of(model)
    prompt = list(range(3, 21))
    answer = _alone(target, prompt, 8)
    assert len(answer) == 2
    drafter = ScriptedDrafter(
        {tuple(prompt): answer}, vocab_size=97, accuracy=1.0, depth=6, width=1, budget=6
    )
    engine = Engine(target, drafter=drafter)
    assert engine.generate([prompt], _params(8))[0].token_ids == answer


@pytest.mark.parametrize("prompts", ["hello", [3, 4, 5]])
def test_one_prompt_where_a_list_is_wanted(target: Target, prompts: object) -> None:
    with pytest.raises(RequestError, match="takes a list of prompts, and this is one prompt"):
        Engine(target).generate(prompts)


@pytest.mark.parametrize("has_head", [False, True])
def test_a_failing_step_drops_its_neighbours_and_says_so(
    target: Target, has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that breaks off may have committed one request and not the other."""
    engine = Engine(target, tiny_head(target) if has_head else None)
    first, second = engine.stream([5], _params(9)), engine.stream([7], _params(9))
    next(first)
    next(second)
    with monkeypatch.context() as patched:
        patched.setattr(engine._verifier, "_commit", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(first)
    with pytest.raises(RequestError, match="the request was dropped"):
        list(second)
    assert not engine.has_work
    assert engine.generate([[7]], _params(9))[0].token_ids == _alone(target, [7], 9)


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_head_of_mixed_precision_is_made_one(target: Target) -> None:
    head = tiny_head(target)
    head.midlayer.to(torch.bfloat16)
    completion = Engine(target, head).generate([[5, 6]], _params(4))[0]
    assert completion.token_ids == _alone(target, [5, 6], 4)


def test_a_stream_left_open_does_not_break_the_end_of_the_program(warm: WarmPrograms) -> None:
    program = (
        "from fledge import Engine, SamplingParams\n"
        "from fledge.testing import target_of, tiny_model\n"
        "stream = Engine(target_of(tiny_model())).stream([5], SamplingParams(max_tokens=9))\n"
        "next(stream)\n"
    )
    ended = warm.run([sys.executable, "-c", program], text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_step_without_work_does_nothing(target: Target) -> None:
    engine = Engine(target, tiny_head(target))
    engine.step()
    assert engine.stats.num_passes == 0
