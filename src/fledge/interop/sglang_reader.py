"""SGLang's rules for an EAGLE-3 head, from its sources (0.5.17), followed strictly.

SGLang could not be run where this was written: these are its loading rules as its code states them.

- One architecture: LlamaForCausalLMEagle3. speculators configs are not read.
- Layer ids come from `eagle_config` alone and name layers whose output is read; the target's class
  adds 1. deepseek_v2 and glm4_moe_lite add 1 only when the first id is 1; gpt_oss adds none when
  the largest id is the number of layers; minimax_m3_vl adds 1 to its own default too.
- States are taken before a layer runs: neither the embedding nor the last layer's output can be.
- The width of `fc` comes from `num_aux_hidden_states`, else from those ids, else it is 3 taps. A
  state as wide as the embedding is taken for the head's own, and `fc` is left out.
- `fc_norm` (or `use_aux_norm`) norms each tap, by tensors `fc_norm.0` and so on, which older files
  call aux_norm_low, aux_norm_mid and aux_norm_high; `norm_output` feeds back the normed state;
  `norm_before_fc` is read under `eagle_config` first.
- `d2t` holds differences: token i of the draft vocabulary is target token i + d2t[i].
- `norm_before_residual` is not known: the residual is the raw hidden state.
- Queries, keys and values have no biases; q and k norms do not exist; the head's window is an
  option of the command, not of the config.
- The embedding is replaced by the target's unless the hidden sizes differ.
- Tensors whose names are not known are skipped without a word.
"""

from pathlib import Path
from typing import Any

from fledge.interop.engine_view import EngineView, build, layer_sizes, read_files, require
from fledge.interop.sglang_layers import captured_layers
from fledge.interop.target_facts import TargetFacts
from fledge.models.head_config import HeadConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
_IDS = "eagle_aux_hidden_state_layer_ids"
_OTHER_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


def read_as_sglang(directory: Path, target: TargetFacts | None = None) -> EngineView:
    """The head that SGLang runs from an export, for this target."""
    files = read_files(directory)
    config = files.config
    names = config.get("architectures") or []
    require(names == [ARCHITECTURE], directory, f"SGLang reads {ARCHITECTURE} only, not {names}.")
    require(config["num_hidden_layers"] == 1, directory, "an EAGLE-3 head has 1 layer.")
    require(not config.get("norm_before_residual"), directory, "SGLang's residual is not normed.")
    require(not config.get("attention_bias"), directory, "SGLang's projections have no biases.")
    require(config.get("draft_vocab_size") is not None, directory, "no draft_vocab_size.")
    require(not config.get("tie_word_embeddings"), directory, "logits would come from embeddings.")
    eagle = config.get("eagle_config") or {}
    require(eagle.get("use_aux_hidden_state", True), directory, "taps are switched off.")
    ids = eagle.get(_IDS)
    num_taps = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    taps = captured_layers(None if ids is None else tuple(ids), target)
    require(
        taps is None or len(taps) == num_taps,
        directory,
        f"SGLang hands over {list(taps or ())}; fc reads {num_taps} taps.",
    )
    head_config = HeadConfig(
        **layer_sizes(config),
        draft_vocab_size=config["draft_vocab_size"],
        taps=taps,
        num_taps=num_taps,
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )
    require(
        num_taps * head_config.target_hidden_size != head_config.hidden_size,
        directory,
        "SGLang leaves fc out of a head whose taps are as wide as its hidden state.",
    )
    tensors = _tensors(files.tensors)
    embedding = tensors.get("embed_tokens.weight")
    require(
        embedding is None or head_config.target_hidden_size != head_config.hidden_size,
        directory,
        "SGLang replaces the head's own embedding by the target's.",
    )
    return EngineView(build(files, head_config, tensors), taps, takes_window_option=True)


def _tensors(stored: dict[str, Any]) -> dict[str, Any]:
    """Tensors under our names; with or without `model.`, the layer and the norms by either name."""
    names = {name: name.removeprefix("model.") for name in stored}
    for theirs, ours in _OTHER_NAMES.items():
        names = {name: one.replace(theirs, ours, 1) for name, one in names.items()}
    return {ours: stored[name] for name, ours in names.items() if ours != "t2d"}
