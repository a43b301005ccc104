"""New heads: shaped after their targets, begun from their output rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fledge.contracts.errors import ConfigError
from fledge.contracts.head_settings import HeadSettings
from fledge.contracts.sampling import SamplingParams
from fledge.engine.engine import Engine
from fledge.models.head_config import HeadConfig
from fledge.models.target import Target
from fledge.models.target_reading import Readout
from fledge.testing import ARCHITECTURES, target_of, tiny_model
from fledge.training.head_init import count_weights, make_head, shape_head

DRAFT_IDS = np.array([1, 2, 5, 8, 13, 21, 34, 55])


def shaped(target: Target, **settings: object) -> HeadConfig:
    return shape_head(
        target.config,
        HeadSettings(**settings),  # type: ignore[arg-type]
        taps=(1, 2, 4),
        draft_vocab_size=len(DRAFT_IDS),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_of_every_architecture_fits_its_target(architecture: str) -> None:
    target = target_of(tiny_model(architecture))
    config = shaped(target)
    assert (config.hidden_size, config.vocab_size) == (target.hidden_size, target.vocab_size)
    assert config.max_position_embeddings == target.context_len
    assert config.rms_norm_eps == target.config.rms_norm_eps
    head = make_head(config, DRAFT_IDS, seed=0, readout=target.readout)
    assert sum(weight.numel() for weight in head.parameters()) == count_weights(config)
    Engine(target, head.eval()).generate([(5, 6, 7)], SamplingParams(max_tokens=4))


def test_the_shape_follows_the_target() -> None:
    config = shaped(target_of(tiny_model("llama")))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.intermediate_size == 48
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.taps, config.num_taps, config.draft_vocab_size) == ((1, 2, 4), 3, 8)
    assert (config.sliding_window, config.fc_norm, config.norm_output) == (None, False, False)


def test_settings_win_over_the_target() -> None:
    config = shaped(
        target_of(tiny_model("llama")),
        mlp_width=100,
        rope_theta=5000.0,
        sliding_window=16,
        fc_norm=True,
        norm_output=True,
        norm_before_residual=True,
        norm_before_fc=True,
    )
    assert (config.intermediate_size, config.rope_theta, config.sliding_window) == (100, 5e3, 16)
    assert config.fc_norm
    assert config.norm_output
    assert config.norm_before_residual
    assert config.norm_before_fc


@pytest.mark.parametrize(("asked", "num_kv_heads"), [(8, 4), (2, 1), (6, 3), (4, 2)])
def test_attention_heads_are_in_the_targets_proportion(asked: int, num_kv_heads: int) -> None:
    config = shaped(target_of(tiny_model("llama")), attention_heads=asked)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (asked, num_kv_heads, 8)


def test_attention_heads_that_cannot_share_are_refused() -> None:
    target = target_of(tiny_model("llama"))
    message = r"attention_heads is 7, and 2 query heads.*\(4 have 2\); give a multiple of 2, or 0"
    with pytest.raises(ConfigError, match=message):
        shaped(target, attention_heads=7)
    alone = target_of(tiny_model("llama", num_key_value_heads=4))
    config = shaped(alone, attention_heads=7)
    assert (config.num_heads, config.num_kv_heads) == (7, 7)


def test_hybrid_targets_give_the_rotation_of_full_attention() -> None:
    config = shaped(target_of(tiny_model("gemma3-hybrid")))
    assert config.rope_theta == 1_000_000.0


def test_other_rope_types_are_kept() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config = shaped(target_of(tiny_model("llama", rope_parameters=scaling)))
    assert config.rope_theta == 10000.0
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_a_config_that_says_little_is_enough() -> None:
    little = SimpleNamespace(
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=97,
        max_position_embeddings=64,
        layer_norm_epsilon=1e-6,
    )
    config = shape_head(little, HeadSettings(), taps=(0,), draft_vocab_size=8)
    assert (config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 8, 128)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)


def test_an_odd_head_size_is_refused() -> None:
    odd = SimpleNamespace(hidden_size=21, num_attention_heads=3)
    with pytest.raises(ConfigError, match="have 7 numbers each; a head rotates pairs"):
        shape_head(odd, HeadSettings(), taps=(0,), draft_vocab_size=8)


def test_output_rows_begin_as_the_targets() -> None:
    config = shaped(target_of(tiny_model("llama")))
    weight_VD = torch.randn(97, 32, dtype=torch.bfloat16)
    head = make_head(config, DRAFT_IDS, seed=0, readout=Readout(weight_VD, scale=0.5))
    assert head.lm_head.weight.dtype is torch.float32
    assert torch.equal(head.lm_head.weight, 0.5 * weight_VD[DRAFT_IDS].float())
    assert head.draft_to_target_V.tolist() == DRAFT_IDS.tolist()
    assert head.training


def test_first_weights_are_a_function_of_the_seed() -> None:
    config = shaped(target_of(tiny_model("llama")))
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = (make_head(config, DRAFT_IDS, seed=s, readout=None) for s in (1, 1, 2))
    # Whoever trains in a larger program keeps the random numbers they had.
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
