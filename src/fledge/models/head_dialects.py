"""config.json of a head in the dialects of the field <-> `HeadConfig`.

Layer ids are the trap. Inside fledge they count completed layers. At the top level of the file
(vLLM, speculators) they do too; under `eagle_config` (SpecForge, SGLang, Model-Optimizer) the same
layer is named one less, as the index of the layer whose output it is.
"""

from typing import Any

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.head_config import NUM_DEFAULT_TAPS, HeadConfig

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ROPE_KEYS = ("rope_type", "type", "rope_theta")
_DEFAULT_ROPE_THETA = 10000.0


def json_to_config(data: dict[str, Any], *, where: str) -> HeadConfig:
    """Read either dialect; `where` names the file in errors."""
    is_nested = "transformer_layer_config" in data
    layer = data["transformer_layer_config"] if is_nested else data
    eagle = data.get("eagle_config") or {}

    def need(source: dict[str, Any], key: str) -> int:
        value = source.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArtifactError(f"{where}: {key} is {value!r}; a positive whole number is needed.")
        return value

    hidden_size = need(layer, "hidden_size")
    num_heads = need(layer, "num_attention_heads")
    vocab_size = need(layer, "vocab_size")
    taps = _taps(data, eagle, where)
    theta, scaling = _rope(layer)
    return HeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=data.get("target_hidden_size") or hidden_size,
        intermediate_size=need(layer, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=layer.get("num_key_value_heads") or num_heads,
        head_dim=layer.get("head_dim") or hidden_size // num_heads,
        vocab_size=vocab_size,
        draft_vocab_size=data.get("draft_vocab_size") or vocab_size,
        rms_norm_eps=layer.get("rms_norm_eps", 1e-5),
        max_position_embeddings=layer.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        taps=taps,
        num_taps=len(taps) if taps else data.get("num_aux_hidden_states") or NUM_DEFAULT_TAPS,
        attention_bias=bool(layer.get("attention_bias", False)),
        sliding_window=_window(layer),
        # speculators means True when the key is absent, everybody else False.
        norm_before_residual=bool(data.get("norm_before_residual", is_nested)),
        norm_before_fc=bool(data.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        fc_norm=bool(data.get("fc_norm", data.get("use_aux_norm", False))),
        norm_output=bool(data.get("norm_output", False)),
    )


def _taps(data: dict[str, Any], eagle: dict[str, Any], where: str) -> tuple[int, ...] | None:
    completed, outputs = data.get(_LAYER_IDS), eagle.get(_LAYER_IDS)
    from_outputs = tuple(layer + 1 for layer in outputs) if outputs else None
    if not completed:
        return from_outputs
    if from_outputs and tuple(completed) != from_outputs:
        raise MismatchError(
            f"{where} names two sets of tapped layers: {_LAYER_IDS} {completed} (completed "
            f"layers) and eagle_config.{_LAYER_IDS} {outputs} (one less each); remove one."
        )
    return tuple(completed)


def _rope(layer: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and, for rope types beyond the default, their parameters; either schema."""
    parameters = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or layer.get("rope_theta") or _DEFAULT_ROPE_THETA
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "default":
        return float(theta), None
    rest = {key: value for key, value in parameters.items() if key not in _ROPE_KEYS}
    return float(theta), {"rope_type": rope_type, **rest}


def _window(layer: dict[str, Any]) -> int | None:
    """The window of a head whose one layer says it slides; a bare key may be a leftover."""
    is_sliding = (layer.get("layer_types") or [None])[0] == "sliding_attention"
    return layer.get("sliding_window") if is_sliding else None


def config_to_json(config: HeadConfig) -> dict[str, Any]:
    """The Llama-like dialect that SpecForge writes and both serving engines read."""
    rope_scaling = config.rope_scaling
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": "silu",
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
    eagle: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "norm_before_fc": config.norm_before_fc,
    }
    if config.taps is not None:
        data[_LAYER_IDS] = list(config.taps)
        if min(config.taps) > 0:  # the embedding is the output of no layer
            eagle[_LAYER_IDS] = [tap - 1 for tap in config.taps]
    if config.sliding_window is not None:
        data |= {"sliding_window": config.sliding_window, "layer_types": ["sliding_attention"]}
    return data | {"eagle_config": eagle}
