"""A head for vLLM: safetensors, un-prefixed names, layer ids at the top level of config.json."""

from pathlib import Path
from typing import Any

import torch

from fledge.interop.checkpoint_files import write_checkpoint
from fledge.interop.public_tensors import public_tensors
from fledge.interop.taps import check_ascending, known_taps
from fledge.interop.target_facts import TargetFacts, has_default_taps
from fledge.models.head import Eagle3Head
from fledge.models.head_dialects import config_to_json

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"


def check_vllm(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what vLLM would misread."""
    check_ascending(known_taps(head.config, target), "vLLM")


def write_vllm(head: Eagle3Head, directory: Path, target: TargetFacts | None) -> None:
    tensors = public_tensors(head)
    if head.config.attention_bias and not head.config.output_bias:
        # vLLM makes room for this one too and leaves it at random where the file has none.
        tensors[_OUTPUT_BIAS] = torch.zeros(head.config.hidden_size, dtype=head.fc.weight.dtype)
    write_checkpoint(flat_config(head, target), tensors, directory)


def flat_config(head: Eagle3Head, target: TargetFacts | None) -> dict[str, Any]:
    """Our own config.json, without layer ids where the engines' default is meant."""
    data = config_to_json(head.config)
    data["torch_dtype"] = str(head.fc.weight.dtype).removeprefix("torch.")
    if has_default_taps(head.config, target):
        data.pop(LAYER_IDS, None)
        data["eagle_config"].pop(LAYER_IDS, None)
    return data
