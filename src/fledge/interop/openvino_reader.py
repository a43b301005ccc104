"""OpenVINO's rules for an EAGLE-3 head, from optimum-intel 2.2.0 and openvino-genai 2026.4,
followed strictly.

- Architecture LlamaForCausalLMEagle3 (or Eagle3LlamaForCausalLM), layer called `midlayer`.
- Three taps, fused without norms; the residual is the raw hidden state; no biases.
- The embedding is in the file, as wide as the target's states.
- The outputs of the layers in hidden_layers_list, which the conversion's last step puts into the
  model; without it, those of layers 2, n//2 and n-3.
"""

from pathlib import Path

from fledge.interop.engine_view import EngineView, build, layer_sizes, read_files, require
from fledge.interop.openvino_export import LAYERS, without_shared_embedding
from fledge.interop.target_facts import TargetFacts
from fledge.models.head_config import HeadConfig

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_UNKNOWN_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_as_openvino(directory: Path, target: TargetFacts) -> EngineView:
    """The head that OpenVINO runs from an export."""
    files = read_files(directory)
    config = files.config
    name = config["architectures"][0]
    require(name in _ARCHITECTURES, directory, f"optimum-intel does not know {name}.")
    for flag in (*_UNKNOWN_FLAGS, "attention_bias"):
        require(not config.get(flag), directory, f"optimum-intel does not know {flag}.")
    require("embed_tokens.weight" in files.tensors, directory, "the embedding is not in the file.")
    layers: list[int] = config.get(LAYERS) or []
    require(bool(layers), directory, f"{LAYERS} is not in its config.json.")
    head_config = HeadConfig(
        **layer_sizes(config), draft_vocab_size=config["draft_vocab_size"], num_taps=3
    )
    tensors = {name: tensor for name, tensor in files.tensors.items() if name != "t2d"}
    head = build(files, head_config, tensors)
    return EngineView(without_shared_embedding(head, target), tuple(layer + 1 for layer in layers))
