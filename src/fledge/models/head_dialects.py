"""config.json of a head in the dialects of the field <-> `HeadConfig`.

Layer ids are the trap. Inside fledge they count completed layers. At the top level of the file
(vLLM, speculators) they do too; under `eagle_config` (SpecForge, SGLang, Model-Optimizer) the same
layer is named one less, as the index of the layer whose output it is.
"""

import sys
from collections.abc import Callable
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.models.head_config import NUM_DEFAULT_TAPS, HeadConfig
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


class _Fields:
    """Typed reads of one JSON object; null means absent, and a wrong type is never guessed at."""

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self._where, self._prefix = where, prefix

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; it must be there unless there is a default."""
        if default is not None and self.values.get(key) is None:
            return default
        size: int = self._checked(key, _is_size, "a positive whole number")
        return size

    def number(self, key: str, default: float) -> float:
        if self.values.get(key) is None:
            return default
        return float(self._checked(key, _is_positive_number, "a positive finite number"))

    def flag(self, key: str, default: bool) -> bool:
        if self.values.get(key) is None:
            return default
        flag: bool = self._checked(key, _is_flag, "true or false")
        return flag

    def text(self, key: str) -> str | None:
        if self.values.get(key) is None:
            return None
        text: str = self._checked(key, _is_text, "a string")
        return text

    def texts(self, key: str) -> list[str]:
        if self.values.get(key) is None:
            return []
        texts: list[str] = self._checked(key, _is_list_of(_is_text), "a list of strings")
        return texts

    def layers(self, key: str) -> tuple[int, ...]:
        if self.values.get(key) is None:
            return ()
        need = "a list of whole numbers from 0"
        return tuple(self._checked(key, _is_list_of(_is_layer), need))

    def object(self, key: str) -> "_Fields":
        if self.values.get(key) is None:
            return _Fields({}, self._where)
        values = self._checked(key, _is_object, "an object")
        return _Fields(values, self._where, f"{self._prefix}{key}.")

    def mapped(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "_Fields":
        """The same object with other values, still called by its own name in errors."""
        return _Fields(change(self.values), self._where, self._prefix)

    def _checked(self, key: str, fits: Callable[[Any], bool], need: str) -> Any:
        value = self.values.get(key)
        if not fits(value):
            raise ArtifactError(
                f"{self._where}: {self._prefix}{key} is {value!r}; {need} is needed."
            )
        return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_layer(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_positive_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and 0 < value <= sys.float_info.max


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def json_to_config(data: dict[str, Any], *, where: str) -> HeadConfig:
    """Read either dialect; `where` names the file in errors."""
    top = _Fields(data, where)
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


def _check_architecture(layer: _Fields, where: str) -> None:
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


def _check_variant(top: _Fields, eagle: _Fields, where: str) -> None:
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


def _has_qk_norm(top: _Fields, layer: _Fields) -> bool:
    """Whether the layer is Qwen3's; serving engines choose their code by the architecture."""
    names = [] if _NESTED in top.values else top.texts("architectures")
    if names:
        return any(_QWEN3 in name for name in names)
    return layer.text("model_type") == "qwen3"


def ties_embeddings(data: dict[str, Any], *, where: str) -> bool:
    """Whether the logits are made with the embedding when there is no `lm_head`."""
    top = _Fields(data, where)
    nested = top.object(_NESTED).flag("tie_word_embeddings", False)
    return top.flag("tie_word_embeddings", nested)


def _taps(top: _Fields, eagle: _Fields, where: str) -> tuple[int, ...] | None:
    completed, outputs = top.layers(_LAYER_IDS), eagle.layers(_LAYER_IDS)
    from_outputs = tuple(layer + 1 for layer in outputs)
    if completed and outputs and completed != from_outputs:
        raise MismatchError(
            f"{where} names two sets of tapped layers: {_LAYER_IDS} {list(completed)} (completed "
            f"layers) and eagle_config.{_LAYER_IDS} {list(outputs)} (one less each); remove one."
        )
    return completed or from_outputs or None


def _rope(layer: _Fields, where: str) -> tuple[float, dict[str, Any] | None]:
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


def _window(layer: _Fields) -> int | None:
    """The window of a head whose one layer says it slides; a bare key may be a leftover."""
    is_sliding = layer.texts("layer_types")[:1] == ["sliding_attention"]
    return layer.size("sliding_window") if is_sliding else None


def config_to_json(config: HeadConfig) -> dict[str, Any]:
    """The Llama-like dialect that SpecForge writes and both serving engines read."""
    rope_scaling = config.rope_scaling
    data: dict[str, Any] = {
        "architectures": [f"Eagle3{_QWEN3}" if config.qk_norm else "LlamaForCausalLMEagle3"],
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
