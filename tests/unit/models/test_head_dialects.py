"""config.json of a head: every dialect means the same head, and a wrong value says which and why.

Catches: layer ids read in the wrong dialect, a flag whose absence means something else elsewhere, a
value of the wrong type that is cast or ignored, two values that contradict each other, and an
architecture that would load and draft badly.
"""

import dataclasses
from typing import Any

import pytest

from fledge import Engine
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.models.head_config import HeadConfig, default_taps
from fledge.models.head_dialects import config_to_json, json_to_config
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model

IDS = "eagle_aux_hidden_state_layer_ids"
WHERE = "heads/mine/config.json"


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture
def plain(target: Target) -> dict[str, Any]:
    """The config.json that a tiny head is saved with."""
    return config_to_json(tiny_head(target).config)


def read(data: dict[str, Any]) -> HeadConfig:
    return json_to_config(data, where=WHERE)


def test_rope_scaling_survives_in_the_config(target: Target) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    config = tiny_head(target, rope_scaling={"rope_type": "linear", "factor": 4.0}).config
    for one in (config, dataclasses.replace(config, rope_scaling=scaling)):
        assert read(config_to_json(one)) == one


def speculators_config(plain: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """The same head as speculators would describe it."""
    outer = ("draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    inner = {key: value for key, value in plain.items() if key not in (*outer, "eagle_config")}
    del inner["norm_before_residual"]
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": inner,
        **{key: plain[key] for key in outer},
        **extra,
    }


def test_nested_config_of_speculators(plain: dict[str, Any]) -> None:
    assert read(speculators_config(plain, norm_before_residual=False)) == read(plain)


def test_speculators_means_true_when_norm_before_residual_is_absent(plain: dict[str, Any]) -> None:
    nested = speculators_config(plain)
    del plain["norm_before_residual"]
    assert not read(plain).norm_before_residual
    assert read(nested).norm_before_residual


@pytest.mark.parametrize(
    ("change", "taps", "num_taps"),
    [
        ({}, None, 3),
        ({IDS: [2, 18, 33]}, (2, 18, 33), 3),
        ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33), 3),
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33), 3),
        ({IDS: [0, 5], "num_aux_hidden_states": 2}, (0, 5), 2),
        ({"eagle_config": {IDS: [0, 8, 16, 24, 32]}}, (1, 9, 17, 25, 33), 5),
        ({"eagle_config": None}, None, 3),
    ],
)
def test_layer_ids_in_every_dialect(
    plain: dict[str, Any], change: dict[str, Any], taps: tuple[int, ...] | None, num_taps: int
) -> None:
    plain.pop("num_aux_hidden_states")
    config = read(plain | {"eagle_config": {}} | change)
    assert (config.taps, config.num_taps) == (taps, num_taps)


def test_both_dialects_are_written(target: Target) -> None:
    data = config_to_json(tiny_head(target, taps=(1, 2, 4)).config)
    assert data[IDS] == [1, 2, 4]
    assert data["eagle_config"][IDS] == [0, 1, 3]
    assert data["num_aux_hidden_states"] == 3
    data = config_to_json(tiny_head(target, taps=(0, 2, 4)).config)
    assert data[IDS] == [0, 2, 4]
    assert IDS not in data["eagle_config"], "the embedding is the output of no layer"


def test_contradicting_layer_ids_name_both(plain: dict[str, Any]) -> None:
    plain |= {IDS: [2, 18, 33], "eagle_config": {IDS: [2, 18, 33]}}
    with pytest.raises(MismatchError, match=r"two sets of tapped layers") as caught:
        read(plain)
    assert str(caught.value).count("[2, 18, 33]") == 2
    assert WHERE in str(caught.value)


def test_a_bare_sliding_window_is_a_leftover(plain: dict[str, Any]) -> None:
    assert read(plain | {"sliding_window": 9}).sliding_window is None
    slides = plain | {"sliding_window": 9, "layer_types": ["sliding_attention"]}
    assert read(slides).sliding_window == 9


@pytest.mark.parametrize(
    ("change", "theta", "scaling"),
    [
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None),
        ({"rope_parameters": None, "rope_theta": 8.0}, 8.0, None),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            10000.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rope_in_both_schemas(
    plain: dict[str, Any], change: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    config = read(plain | change)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


REQUIRED = ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
OPTIONAL = (
    "target_hidden_size",
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "num_aux_hidden_states",
)
FLAGS = (
    "attention_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "turned_rows",
)
OBJECTS = ("eagle_config", "rope_parameters", "rope_scaling", "transformer_layer_config")
WRONG_SIZES = (0, -3, "32", 1.5, True, [4])
WRONG_NUMBERS = (0, -1.0, "1e-5", float("nan"), float("inf"), 10**400, True, [])
WRONG_TYPES: list[tuple[str, object, str]] = [
    *(
        (key, value, "a positive whole number")
        for key in REQUIRED
        for value in (None, *WRONG_SIZES)
    ),
    *((key, value, "a positive whole number") for key in OPTIONAL for value in WRONG_SIZES),
    *(
        (key, value, "a positive finite number")
        for key in ("rms_norm_eps", "rope_theta")
        for value in WRONG_NUMBERS
    ),
    *(
        (key, value, "true or false")
        for key in (*FLAGS, "use_aux_norm")
        for value in (0, 1, "false", [])
    ),
    *((key, value, "an object") for key in OBJECTS for value in ([], "x", 3, True)),
    *(
        (IDS, value, "a list of whole numbers from 0")
        for value in (3, "2", [-1], [True], [1.0], {})
    ),
    ("hidden_act", 3, "a string"),
    ("layer_types", "sliding_attention", "a list of strings"),
    ("layer_types", [1], "a list of strings"),
]


@pytest.mark.parametrize(("key", "value", "need"), WRONG_TYPES, ids=str)
def test_wrong_types_name_file_key_value_and_need(
    plain: dict[str, Any], key: str, value: object, need: str
) -> None:
    plain |= {"rope_parameters": None}
    plain.pop("fc_norm")
    with pytest.raises(ArtifactError) as caught:
        read(plain | {key: value})
    assert str(caught.value) == f"{WHERE}: {key} is {value!r}; {need} is needed."


@pytest.mark.parametrize(
    ("key", "values", "path"),
    [
        ("eagle_config", {IDS: [-2]}, f"eagle_config.{IDS} is [-2]"),
        ("eagle_config", {"norm_before_fc": 1}, "eagle_config.norm_before_fc is 1"),
        ("rope_parameters", {"rope_theta": -1}, "rope_parameters.rope_theta is -1"),
        ("rope_parameters", {"rope_type": 7}, "rope_parameters.rope_type is 7"),
        (
            "transformer_layer_config",
            {"hidden_size": 0},
            "transformer_layer_config.hidden_size is 0",
        ),
    ],
)
def test_wrong_types_deeper_down_name_the_path(
    plain: dict[str, Any], key: str, values: dict[str, Any], path: str
) -> None:
    with pytest.raises(ArtifactError) as caught:
        read(plain | {key: values})
    assert f"{WHERE}: {path}; " in str(caught.value)


@pytest.mark.parametrize("key", [*OPTIONAL, *FLAGS, "rms_norm_eps", "eagle_config", IDS])
def test_null_means_absent(plain: dict[str, Any], key: str) -> None:
    absent = {name: value for name, value in plain.items() if name != key}
    assert read(plain | {key: None}) == read(absent)


def test_a_sliding_layer_needs_its_window(plain: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="sliding_window is None; a positive whole number"):
        read(plain | {"layer_types": ["sliding_attention"]})


def test_unknown_rope_types_list_the_known(plain: dict[str, Any]) -> None:
    plain["rope_parameters"] = {"rope_type": "spiral"}
    with pytest.raises(ArtifactError) as caught:
        read(plain)
    assert f"{WHERE}: unknown rope type 'spiral'; known are default, dynamic," in str(caught.value)
    assert "yarn" in str(caught.value)


@pytest.mark.parametrize("activation", ["gelu", "swish"])
def test_other_activations_are_refused(plain: dict[str, Any], activation: str) -> None:
    plain["hidden_act"] = activation
    with pytest.raises(MismatchError, match=f"hidden_act is '{activation}'; .* 'silu' only"):
        read(plain)
    del plain["hidden_act"]
    assert read(plain)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False; .* with True"),
        ({"use_last_layernorm": False}, "use_last_layernorm is False"),
        ({"use_input_layernorm_in_first_layer": False}, "in_first_layer is False"),
        ({"use_mtp_layernorm": True}, "use_mtp_layernorm is True; .* with False"),
        ({"parallel_draft_step": 4}, "parallel_draft_step is 4; .* 1 token a step"),
    ],
)
def test_relatives_that_compute_something_else(
    plain: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(MismatchError, match=message):
        read(plain | {"eagle_config": flags})


def test_other_algorithms_of_speculators_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="speculators_model_type is 'dflash'; .* 'eagle3'"):
        read(speculators_config(plain) | {"speculators_model_type": "dflash"})


def test_norms_on_queries_and_keys_come_with_qwen3s_layer(plain: dict[str, Any]) -> None:
    assert read(plain | {"architectures": ["Eagle3Qwen3ForCausalLM"]}).qk_norm
    assert read(plain | {"architectures": ["Qwen3ForCausalLM"]}).qk_norm
    assert not read(plain | {"model_type": "qwen3"}).qk_norm, "the architecture decides"
    assert not read(plain | {"architectures": ["Eagle3Qwen3vlForCausalLM"]}).qk_norm
    nested = speculators_config(plain)
    assert not read(nested).qk_norm
    nested["transformer_layer_config"] |= {"model_type": "qwen3"}
    assert read(nested).qk_norm


def test_heads_of_several_layers_are_refused(plain: dict[str, Any]) -> None:
    plain["num_hidden_layers"] = 32
    with pytest.raises(MismatchError, match="num_hidden_layers is 32; an EAGLE-3 head has 1 layer"):
        read(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({IDS: [1, 2], "num_aux_hidden_states": 5}, r"names 2 tapped layers \[1, 2\] .* for 5"),
        ({"num_key_value_heads": 3}, "4 attention heads, which 3 key-value heads do not divide"),
        ({"draft_vocab_size": 98}, "has 98 tokens, more than the target's 97"),
        (
            {"turned_rows": True, "target_hidden_size": 64},
            "has turned_rows and a hidden size of 32, but rows of the target have 64 numbers",
        ),
    ],
)
def test_files_that_contradict_themselves(
    plain: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(MismatchError, match=message) as caught:
        read(plain | change)
    assert str(caught.value).startswith(f"{WHERE}: ")


def test_configs_that_contradict_themselves(plain: dict[str, Any]) -> None:
    config = read(plain)
    fields = {name: getattr(config, name) for name in HeadConfig.__slots__}
    with pytest.raises(ConfigError, match=r"names 2 tapped layers \[1, 2\] but is built for 3"):
        HeadConfig(**fields | {"taps": (1, 2)})
    with pytest.raises(ConfigError, match="has 4 attention heads, which 3 key-value heads do not"):
        HeadConfig(**fields | {"num_kv_heads": 3})
    with pytest.raises(ConfigError, match="has 98 tokens, more than the target's 97"):
        HeadConfig(**fields | {"draft_vocab_size": 98})
    with pytest.raises(ConfigError, match="hidden size of 32, but rows of the target have 64"):
        HeadConfig(**fields | {"turned_rows": True, "target_hidden_size": 64})


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [(36, (2, 18, 33)), (30, (2, 15, 27)), (7, (2, 3, 4)), (4, (2, 2, 1)), (1, (1, 0, 0))],
)
def test_default_taps(num_layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(num_layers) == taps


def test_a_head_that_reads_five_layers_must_name_them(target: Target) -> None:
    with pytest.raises(MismatchError) as caught:
        Engine(target, tiny_head(target, num_taps=5))
    message = str(caught.value)
    assert "reads 5 target layers but names none, and the default layers [2, 2, 1] are 3" in message
    assert f"name them in its config.json as {IDS}, 5 counts of completed layers" in message
