"""config.json of a head in the dialects of the field <-> `HeadConfig`.

Layer ids are the trap. Inside fledge they count completed layers. At the top level of the file
(vLLM, speculators) they do too; under `eagle_config` (SpecForge, SGLang, Model-Optimizer) the same
layer is named one less, as the index of the layer whose output it is.
"""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.models.head_config import NUM_DEFAULT_TAPS, HeadConfig
from fledge.models.json_fields import Fields
from fledge.models.nested_layer import fill_defaults

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
_ROPE_KEYS = ("rope_type", "type", "rope_theta")
_ROPE_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_NORM_EPS = 1e-6  # of Llama's config class, with which the engines read the file
_ACTIVATION = "silu"
_QWEN3 = "Qwen3ForCausalLM"
_TURNED_ROWS = "turned_rows"  # of fledge alone: other engines get such heads by an export
_EAGLE_FLAGS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""What Model-Optimizer writes under `eagle_config`, with the values that make an EAGLE-3 head."""


def json_to_config(data: dict[str, Any], *, where: str) -> HeadConfig:
    """Read either dialect; `where` names the file in errors."""
    top = Fields(data, where)
    is_nested = _NESTED in data
    layer = top.object(_NESTED).mapped(fill_defaults) if is_nested else top
    eagle = top.object("eagle_config")
    _check_architecture(layer, where)
    _check_variant(top, eagle, where)
    hidden_size = layer.size("hidden_size")
    num_heads = layer.size("num_attention_heads")
    vocab_size = layer.size("vocab_size")
    taps = _taps(top, eagle, where)
    theta, scaling = _rope(layer, where)
    try:
        return HeadConfig(
            hidden_size=hidden_size,
            target_hidden_size=top.size("target_hidden_size", hidden_size),
            intermediate_size=layer.size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=layer.size("num_key_value_heads", num_heads),
            head_dim=layer.size("head_dim", hidden_size // num_heads),
            vocab_size=vocab_size,
            draft_vocab_size=top.size("draft_vocab_size", vocab_size),
            rms_norm_eps=layer.number("rms_norm_eps", _DEFAULT_NORM_EPS),
            max_position_embeddings=layer.size("max_position_embeddings", 2048),
            rope_theta=theta,
            rope_scaling=scaling,
            taps=taps,
            num_taps=top.size("num_aux_hidden_states", len(taps) if taps else NUM_DEFAULT_TAPS),
            attention_bias=layer.flag("attention_bias", False),
            qk_norm=_has_qk_norm(top, layer),
            sliding_window=_window(layer),
            # speculators means True when the key is absent, everybody else False.
            norm_before_residual=top.flag("norm_before_residual", is_nested),
            norm_before_fc=top.flag("norm_before_fc", eagle.flag("norm_before_fc", False)),
            fc_norm=top.flag("fc_norm", top.flag("use_aux_norm", False)),
            norm_output=top.flag("norm_output", False),
            turned_rows=top.flag(_TURNED_ROWS, False),
        )
    except ConfigError as error:
        # Each value is fine alone; here it was a file, and not a setting, that combined them.
        raise MismatchError(f"{where}: {error}") from error


def _check_architecture(layer: Fields, where: str) -> None:
    """Refuse what would load and draft badly: other layers than the one EAGLE-3 has."""
    activation = layer.text("hidden_act")
    if activation not in (None, _ACTIVATION):
        raise MismatchError(
            f"{where}: hidden_act is {activation!r}; fledge runs heads with {_ACTIVATION!r} only."
        )
    num_layers = layer.size("num_hidden_layers", 1)
    if num_layers != 1:
        raise MismatchError(
            f"{where}: num_hidden_layers is {num_layers}; an EAGLE-3 head has 1 layer. "
            "Is this the directory of a target?"
        )


def _check_variant(top: Fields, eagle: Fields, where: str) -> None:
    """Refuse relatives of EAGLE-3 that share its tensors and compute something else."""
    kind = top.text("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise MismatchError(
            f"{where}: speculators_model_type is {kind!r}; fledge runs 'eagle3' heads only."
        )
    for key, needed in _EAGLE_FLAGS.items():
        if eagle.flag(key, needed) != needed:
            raise MismatchError(
                f"{where}: eagle_config.{key} is {not needed}; fledge runs heads with {needed}."
            )
    steps = eagle.size("parallel_draft_step", 1)
    if steps != 1:
        raise MismatchError(
            f"{where}: eagle_config.parallel_draft_step is {steps}; fledge runs heads that draft 1 "
            "token a step only."
        )


def _has_qk_norm(top: Fields, layer: Fields) -> bool:
    """Whether the layer is Qwen3's; serving engines choose their code by the architecture."""
    names = [] if _NESTED in top.values else top.texts("architectures")
    if names:
        return any(_QWEN3 in name for name in names)
    return layer.text("model_type") == "qwen3"


def ties_embeddings(data: dict[str, Any], *, where: str) -> bool:
    """Whether the logits are made with the embedding when there is no `lm_head`."""
    top = Fields(data, where)
    nested = top.object(_NESTED).flag("tie_word_embeddings", False)
    return top.flag("tie_word_embeddings", nested)


def _taps(top: Fields, eagle: Fields, where: str) -> tuple[int, ...] | None:
    completed, outputs = top.layers(_LAYER_IDS), eagle.layers(_LAYER_IDS)
    from_outputs = tuple(layer + 1 for layer in outputs)
    if completed and outputs and completed != from_outputs:
        raise MismatchError(
            f"{where} names two sets of tapped layers: {_LAYER_IDS} {list(completed)} (completed "
            f"layers) and eagle_config.{_LAYER_IDS} {list(outputs)} (one less each); remove one."
        )
    return completed or from_outputs or None


def _rope(layer: Fields, where: str) -> tuple[float, dict[str, Any] | None]:
    """Theta and, for rope types beyond the default, their parameters; either schema."""
    newer, older = layer.object("rope_parameters"), layer.object("rope_scaling")
    parameters = newer if newer.values else older
    theta = parameters.number("rope_theta", layer.number("rope_theta", _DEFAULT_ROPE_THETA))
    rope_type = parameters.text("rope_type") or parameters.text("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ArtifactError(
            f"{where}: unknown rope type {rope_type!r}; known are {', '.join(_ROPE_TYPES)}."
        )
    if rope_type == "default":
        return theta, None
    rest = {key: value for key, value in parameters.values.items() if key not in _ROPE_KEYS}
    return theta, {"rope_type": rope_type, **rest}


def _window(layer: Fields) -> int | None:
    """The window of a head whose one layer says it slides; a bare key may be a leftover."""
    is_sliding = layer.texts("layer_types")[:1] == ["sliding_attention"]
    return layer.size("sliding_window") if is_sliding else None


def _architecture(config: HeadConfig) -> str:
    name = f"Eagle3{_QWEN3}" if config.qk_norm else "LlamaForCausalLMEagle3"
    # Nobody else knows this one: an engine that skips tensors it does not know would draft badly.
    return f"TurnedRows{name}" if config.turned_rows else name


def config_to_json(config: HeadConfig) -> dict[str, Any]:
    """The Llama-like dialect that SpecForge writes and both serving engines read."""
    rope_scaling = config.rope_scaling
    data: dict[str, Any] = {
        "architectures": [_architecture(config)],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": _ACTIVATION,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "rope_parameters": {
            **(rope_scaling or {"rope_type": "default"}),
            "rope_theta": config.rope_theta,
        },
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": config.num_taps,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    eagle: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc}
    if config.taps is not None:
        data[_LAYER_IDS] = list(config.taps)
        if min(config.taps) > 0:  # the embedding is the output of no layer
            eagle[_LAYER_IDS] = [tap - 1 for tap in config.taps]
    if config.turned_rows:
        data[_TURNED_ROWS] = True
    if config.sliding_window is not None:
        data |= {"sliding_window": config.sliding_window, "layer_types": ["sliding_attention"]}
        data["use_sliding_window"] = True  # Qwen3's config drops the window without it
    return data | {"eagle_config": eagle}
