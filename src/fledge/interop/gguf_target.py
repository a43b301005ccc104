"""A Hugging Face target as a GGUF file, in its own precision, one tensor at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from safetensors import safe_open
from torch import Tensor

from fledge.contracts.errors import MismatchError
from fledge.interop.gguf_names import LAYER_NAMES, pair_rows, stored_type, stored_values
from fledge.interop.gguf_rope import FACTORS, add_rope, check_rope, rope_factors
from fledge.interop.gguf_tokens import add_vocabulary
from fledge.interop.target_facts import TargetFacts
from fledge.store.capacity import require_disk

CONVERTIBLE = frozenset({"llama", "mistral", "qwen3"})
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
_ROTATES_NEIGHBOURS = frozenset({"llama"})
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_target(target: TargetFacts, path: Path) -> None:
    """Write the target; refuses parts that a file of its architecture has no place for."""
    config = json.loads((target.directory / "config.json").read_text(encoding="utf-8"))
    files = sorted(target.directory.glob("*.safetensors"))
    require_disk(path.parent, sum(file.stat().st_size for file in files), path.name)
    theta, scaling = _rope(config)
    check_rope(scaling, "the target")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise MismatchError(
            f"{target.name} has a sliding window of {config['sliding_window']}, for which a GGUF "
            "file of its architecture has no place. Make the file with llama.cpp's own converter "
            "and give it as --target."
        )
    architecture = _ARCHITECTURES[target.model_type]
    writer = GGUFWriter(path, architecture)
    _add_settings(writer, config, theta=theta, scaling=scaling)
    add_vocabulary(writer, target.directory, target.vocab_size)
    is_tied = bool(config.get("tie_word_embeddings", False))
    heads = _heads(config) if architecture in _ROTATES_NEIGHBOURS else {}
    factors = rope_factors(scaling, theta=theta, head_dim=_head_dim(config))
    # Once for the list of tensors, once for their values: the model need not fit in memory.
    for name, tensor in _tensors(files, heads, is_tied=is_tied, factors=factors):
        values = stored_values(tensor)
        writer.add_tensor_info(
            name, values.shape, values.dtype, values.nbytes, raw_dtype=stored_type(tensor)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in _tensors(files, heads, is_tied=is_tied, factors=factors):
        writer.write_tensor_data(stored_values(tensor))
    writer.close()


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = given.get("rope_type") or given.get("type") or "default"
    return float(theta), None if kind == "default" else {**given, "rope_type": kind}


def _heads(config: dict[str, Any]) -> dict[str, int]:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    return {"self_attn.q_proj": num_heads, "self_attn.k_proj": num_kv_heads}


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_settings(
    writer: GGUFWriter, config: dict[str, Any], *, theta: float, scaling: dict[str, Any] | None
) -> None:
    heads = _heads(config)
    num_heads = heads["self_attn.q_proj"]
    head_dim = _head_dim(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(heads["self_attn.k_proj"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(config["vocab_size"])
    add_rope(writer, theta=theta, head_dim=head_dim, scaling=scaling)


def _tensors(
    files: list[Path], heads: dict[str, int], *, is_tied: bool, factors: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (a file, not a dict)
                if is_tied and name == "lm_head.weight":
                    continue  # llama.cpp takes the embedding when there is none
                tensor = stored.get_tensor(name)
                module, kind = _split(name)
                if module in heads:
                    tensor = pair_rows(tensor, heads[module])
                yield _gguf_name(name), tensor
    if factors is not None:
        yield FACTORS, factors


def _split(name: str) -> tuple[str, str]:
    """A tensor's module inside its layer, and whether it is a weight or a bias."""
    module, _, kind = name.rpartition(".")
    parts = module.split(".", 3)
    return (parts[3] if name.startswith("model.layers.") and len(parts) == 4 else module), kind


def _gguf_name(name: str) -> str:
    module, kind = _split(name)
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    if name.startswith("model.layers.") and module in LAYER_NAMES:
        return f"blk.{name.split('.')[2]}.{LAYER_NAMES[module]}.{kind}"
    raise MismatchError(
        f"the target has a tensor {name}, for which a GGUF file of its architecture has no place. "
        "Make the file with llama.cpp's own converter and give it as --target."
    )
