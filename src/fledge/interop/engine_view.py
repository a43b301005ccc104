"""What an engine makes of an exported head: the head it computes, and the layers it hands to it.

Each reader states one engine's rules and follows them on the files alone, without our own reader
of configs. Where an engine would skip or guess without a word, its reader refuses.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class EngineView:
    """An exported head through the eyes of an engine."""

    head: Eagle3Head
    taps: tuple[int, ...] | None
    """Completed layers the engine hands over; None: its default, 2, n//2, n-3."""

    takes_window_option: bool = False
    """The head's sliding window is an option of the serve command, not part of the files."""


@dataclass(frozen=True, slots=True)
class Files:
    """The two files of an export, as stored."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_files(directory: Path) -> Files:
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return Files(directory, config, load_file(directory / WEIGHTS))


def require(holds: bool, directory: Path, message: str) -> None:
    """Refuse an export that its engine would misread."""
    if not holds:
        raise MismatchError(f"{directory}: {message}")


def layer_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes that every engine reads alike from a Llama-like config, with Llama's defaults."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta", 10000.0),
    }
    kind = rope.get("rope_type", "default")
    rest = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    return {
        "hidden_size": config["hidden_size"],
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rest},
    }


def build(files: Files, config: HeadConfig, tensors: dict[str, Tensor]) -> Eagle3Head:
    """The head an engine computes; engines leave missing tensors at random, here they are named."""
    tensors = dict(tensors)
    offsets = tensors.pop("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    require(
        offsets.shape == (config.draft_vocab_size,),
        files.directory,
        f"d2t has {list(offsets.shape)} entries, the draft vocabulary {config.draft_vocab_size}.",
    )
    targets_V = torch.arange(config.draft_vocab_size) + offsets
    embedding = tensors.pop("embed_tokens.weight", None)
    config = dataclasses.replace(config, output_bias="midlayer.self_attn.o_proj.bias" in tensors)
    with torch.device("meta"):
        head = Eagle3Head(config)
    expected = {name: tensor.shape for name, tensor in head.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() & found if expected[name] != found[name])
        raise ArtifactError(
            f"{files.directory}: missing {sorted(expected.keys() - found.keys()) or 'none'}, "
            f"unknown {sorted(found.keys() - expected.keys()) or 'none'}, of another shape "
            f"{wrong or 'none'}."
        )
    head.load_state_dict(tensors, assign=True)
    head.draft_to_target_V, head.own_embedding = targets_V, embedding
    return head.eval()
