"""vLLM's rules for an EAGLE-3 head, from its sources (0.26 to 0.32), followed strictly.

- The class is chosen by `architectures`; names that neither begin nor end with Eagle3 get it in
  front. speculators configs are flattened first, with `norm_before_residual` true when absent.
- Layer ids at the top level are used as they are, counting completed layers; those under
  `eagle_config` only when the top level has none, and also as they are. Both runners agree only on
  the top level, so ids that stand under `eagle_config` alone are refused here.
- The width of `fc` comes from `num_aux_hidden_states`, else from the ids under `eagle_config`, else
  it is 3 taps; Qwen3-style heads also look at the ids of the top level.
- States are handed over in ascending order of layers, each once.
- Names get `model.` in front and `midlayer.` becomes `layers.0.`; `t2d` is not read. Unknown names
  end the loading; missing ones are left at random, except the embedding, which is the target's.
- `attention_bias` gives every projection of attention a bias, the last one too.
"""

from pathlib import Path
from typing import Any

from fledge.interop.engine_view import EngineView, Files, build, layer_sizes, read_files, require
from fledge.models.head_config import HeadConfig

_LLAMA = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
_QWEN3 = ("Eagle3Qwen3ForCausalLM",)
_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER_ARCHITECTURES = {"llama": _LLAMA[0], "qwen3": _QWEN3[0]}


def read_as_vllm(directory: Path) -> EngineView:
    """The head that vLLM runs from an export."""
    files = read_files(directory)
    config = _flattened(files)
    name = str(config["architectures"][0])
    if not (name.startswith("Eagle3") or name.endswith("Eagle3")):
        name = f"Eagle3{name}"
    require(name in _LLAMA + _QWEN3, directory, f"vLLM has no architecture {name}.")
    is_qwen3 = name in _QWEN3
    require(config["num_hidden_layers"] == 1, directory, "an EAGLE-3 head has 1 layer.")
    eagle = config.get("eagle_config") or {}
    require(eagle.get("use_aux_hidden_state", True), directory, "taps are switched off.")
    ids = config.get(_IDS)
    require(
        ids is not None or not eagle.get(_IDS),
        directory,
        f"{_IDS} stands under eagle_config only, where vLLM's runners disagree about it.",
    )
    num_taps = config.get("num_aux_hidden_states") or len(
        (ids if is_qwen3 else None) or eagle.get(_IDS) or (0, 0, 0)
    )
    require(
        ids is None or len(set(ids)) == num_taps and sorted(ids) == list(ids),
        directory,
        f"vLLM hands over {sorted(set(ids or ()))} for layers {ids}; fc reads {num_taps} taps.",
    )
    head_config = HeadConfig(
        **layer_sizes(config),
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        taps=None if ids is None else tuple(ids),
        num_taps=num_taps,
        attention_bias=bool(config.get("attention_bias", False)),
        qk_norm=is_qwen3,
        sliding_window=_window(config),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )
    head = build(files, head_config, _tensors(files, head_config))
    return EngineView(head, head_config.taps)


def _flattened(files: Files) -> dict[str, Any]:
    config = files.config
    if "speculators_model_type" not in config:
        return config
    kind = config["speculators_model_type"]
    require(kind == "eagle3", files.directory, f"{kind} is not eagle3.")
    methods = config["speculators_config"]["proposal_methods"]
    require(methods[0]["speculative_tokens"] >= 1, files.directory, "no drafted tokens.")
    require("name_or_path" in config["speculators_config"]["verifier"], files.directory, "verifier")
    layer = dict(config["transformer_layer_config"])
    model_type = layer.get("model_type", "llama")
    require(model_type in _LAYER_ARCHITECTURES, files.directory, f"layer of type {model_type}.")
    layer["architectures"] = [_LAYER_ARCHITECTURES[model_type]]
    layer["draft_vocab_size"] = config.get("draft_vocab_size")
    layer["norm_before_residual"] = config.get("norm_before_residual", True)
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        layer[key] = config.get(key, False)
    for key in ("target_hidden_size", _IDS):
        if config.get(key):
            layer[key] = config[key]
    return layer


def _window(config: dict[str, Any]) -> int | None:
    is_sliding = (config.get("layer_types") or [""])[0] == "sliding_attention"
    return config["sliding_window"] if is_sliding else None


def _tensors(files: Files, config: HeadConfig) -> dict[str, Any]:
    """Tensors under our names; a prefix that vLLM would double is refused."""
    tensors = {}
    for name, tensor in files.tensors.items():
        if name == "t2d":
            continue
        require(not name.startswith("model."), files.directory, f"{name} gets a second model.")
        ours = name.replace("layers.0.", "midlayer.", 1)
        require(ours not in tensors, files.directory, f"{name} is there twice.")
        tensors[ours] = tensor
    has_output_bias = "midlayer.self_attn.o_proj.bias" in tensors
    require(
        has_output_bias == config.attention_bias,
        files.directory,
        "vLLM reads a bias of o_proj exactly when attention_bias is true.",
    )
    return tensors
