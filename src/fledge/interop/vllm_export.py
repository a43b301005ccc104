"""A head for vLLM: safetensors, un-prefixed names, layer ids at the top level of config.json."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fledge.interop.public_tensors import public_tensors
from fledge.interop.taps import check_ascending, known_taps
from fledge.interop.target_facts import TargetFacts, has_default_taps
from fledge.models.head import Eagle3Head
from fledge.models.head_dialects import config_to_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def check_vllm(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what vLLM would misread."""
    check_ascending(known_taps(head.config, target), "vLLM")


def write_vllm(head: Eagle3Head, directory: Path, target: TargetFacts | None) -> None:
    write_config(flat_config(head, target), directory)
    write_weights(public_tensors(head), directory)


def flat_config(head: Eagle3Head, target: TargetFacts | None) -> dict[str, Any]:
    """Our own config.json, without layer ids where the engines' default is meant."""
    data = config_to_json(head.config)
    data["torch_dtype"] = str(head.fc.weight.dtype).removeprefix("torch.")
    if has_default_taps(head.config, target):
        data.pop(LAYER_IDS, None)
        data["eagle_config"].pop(LAYER_IDS, None)
    return data


def write_config(data: dict[str, Any], directory: Path) -> None:
    (directory / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_weights(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    # The writer makes its file private, unlike every other file here.
    (directory / WEIGHTS).chmod((directory / CONFIG).stat().st_mode)
