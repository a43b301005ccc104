"""SafeAILab EAGLE's rules for an EAGLE-3 head, from its sources, followed strictly.

- The layers handed over are 2, n//2 and n-3, always.
- The head size is hidden_size / heads; there are no biases and no other norms.
- With `target_hidden_size` in the config the target's embedding is not loaded.
- The weights are loaded with `strict=False`: what is missing stays at random, what is unknown is
  skipped, and neither is said. With a full draft vocabulary `d2t` is not used.
"""

from pathlib import Path

import torch

from fledge.interop.engine_view import EngineView, build, layer_sizes, read_files, require
from fledge.models.head_config import HeadConfig

_UNKNOWN_KEYS = ("head_dim", "norm_before_residual", "fc_norm", "norm_output", "eagle_config")


def read_as_eagle(directory: Path) -> EngineView:
    """The head that EAGLE's own code runs from an export."""
    files = read_files(directory)
    config = files.config
    for key in _UNKNOWN_KEYS:
        require(key not in config, directory, f"EAGLE's own code does not know {key}.")
    require(config.get("rope_scaling") is None, directory, "scaled rotation is read otherwise.")
    head_config = HeadConfig(
        **layer_sizes(config), draft_vocab_size=config["draft_vocab_size"], num_taps=3
    )
    require(
        head_config.num_heads * head_config.head_dim == head_config.hidden_size,
        directory,
        "the heads do not make up the hidden size.",
    )
    tensors = {name: tensor for name, tensor in files.tensors.items() if name != "t2d"}
    if config["vocab_size"] == config["draft_vocab_size"]:
        offsets = tensors.pop("d2t", torch.zeros(1))
        require(not offsets.any(), directory, "d2t of a whole vocabulary is not used.")
    require(
        "target_hidden_size" not in config or "embed_tokens.weight" in tensors,
        directory,
        "with target_hidden_size the embedding must be in the file.",
    )
    return EngineView(build(files, head_config, tensors), None)
