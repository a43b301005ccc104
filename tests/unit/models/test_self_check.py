"""A target of an untested family is compared with itself on its own attention when it is loaded.

Catches architectures that look ordinary but compute attention differently: differential attention,
attention in both directions, modules that do not pass our arguments on.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fledge import Engine, SamplingParams
from fledge.contracts.errors import MismatchError
from fledge.contracts.progress import SilentProgress
from fledge.models.attention import ATTENTION_NAME
from fledge.models.checked_target import load_checked_target
from fledge.models.self_check import (
    TESTED_MODEL_TYPES,
    check_reading,
    check_same_as_transformers,
)
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.testing import ARCHITECTURES, draw_wide, target_of, tiny_model, tiny_tokenizer

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _target(model_type: str) -> Target:
    config = AutoConfig.for_model(model_type, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    draw_wide(model, seed=0)
    return Target(model.eval(), None, None)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tested_families_pass_their_own_check(architecture: str) -> None:
    model = tiny_model(architecture)
    assert model.config.model_type in TESTED_MODEL_TYPES
    check_same_as_transformers(target_of(model))


@pytest.mark.parametrize("model_type", ["phi3", "granite", "smollm3", "starcoder2"])
def test_other_ordinary_families_pass(model_type: str) -> None:
    check_same_as_transformers(_target(model_type))


@pytest.mark.parametrize("model_type", ["diffllama", "doge"])
def test_attention_of_another_kind_is_refused(model_type: str) -> None:
    """The first keeps two caches per layer where we keep one, the second changes its mask."""
    with pytest.raises(MismatchError, match=f"'{model_type}' computes other logits"):
        check_same_as_transformers(_target(model_type))


def test_layers_that_bypass_our_attention_are_refused() -> None:
    target = _target("recurrent_gemma")
    with pytest.raises(MismatchError, match=r"layers \[0, 1\] of model type 'recurrent_gemma' do"):
        check_same_as_transformers(target)


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"'bert' computes other logits .* at most 0.001"):
        check_same_as_transformers(_target("bert"))


def test_modules_that_keep_our_arguments_to_themselves_are_refused() -> None:
    with pytest.raises(MismatchError, match="does not pass arguments of the model on"):
        check_same_as_transformers(_target("stablelm"))


def test_an_untested_family_is_checked_on_loading_and_then_works(tmp_path: Path) -> None:
    config = AutoConfig.for_model("granite", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    draw_wide(model, seed=1)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = Engine.load(str(tmp_path), dtype="float32", device="cpu")
    prompt = [5, 6, 7, 8]
    ids = torch.tensor([prompt])
    expected = model.eval().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    completion = engine.generate([prompt], SamplingParams(max_tokens=12))[0]
    assert list(completion.token_ids) == expected[0, 4:].tolist()


def test_a_window_that_the_attention_does_not_ask_for_is_refused() -> None:
    """The probes are shorter than the window: only what the layers ask for can show it."""
    config = AutoConfig.for_model("phimoe", sliding_window=16, num_local_experts=2, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    draw_wide(model, seed=0)
    with pytest.raises(MismatchError, match="a sliding window of 16 tokens that its attention"):
        check_same_as_transformers(Target(model.eval(), None, None))


def test_attention_in_both_directions_is_refused_by_its_flag() -> None:
    model = tiny_model("gemma3-hybrid", use_bidirectional_attention=True)
    with pytest.raises(MismatchError, match="use_bidirectional_attention"):
        target_of(model)


@torch.no_grad()
def _model_with_key_biases() -> Any:
    """Like Qwen2.5: scores of several hundred, nearly the same for all keys, in bfloat16."""
    model = tiny_model("qwen2", seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.view(-1, 8)[:, 3] = 400.0  # the slowest of the four rotations
    return model.to(torch.bfloat16)


@torch.no_grad()
def test_scores_that_bfloat16_cannot_hold_are_not_held_against_a_target(tmp_path: Path) -> None:
    model = _model_with_key_biases()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_checked_target(
        "tiny",
        tmp_path,
        origin="a test",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        progress=SilentProgress(),
    )
    check_same_as_transformers(target)

    ids_T = torch.arange(3, 15) * 7 % target.vocab_size
    final_TD = target.read(ids_T, make_documents([12], target.device)).final_TD
    ours = target.readout.logits(final_TD).double()
    oracle = target.logits_by_transformers(ids_T).double()
    model.set_attn_implementation("eager")
    eager = model(ids_T[None], use_cache=False).logits[0].double()
    assert (ours - oracle).norm() < 0.05 * oracle.norm()
    assert (ours - eager).norm() > 0.15 * eager.norm()


def test_scaled_logits_are_refused_in_bfloat16_too() -> None:
    target = target_of(_model_with_key_biases())
    check_reading(target)
    target._model.lm_head.register_forward_hook(lambda module, args, output: output * 1.1)
    with pytest.raises(MismatchError, match=r"other logits of its final .* difference 0.091, at"):
        check_reading(target)
