"""llama.cpp's rules for an EAGLE-3 head, from its sources (August to October 2026), followed
strictly.

- Architecture `eagle3`, one block; exactly three `target_layers`, counted as completed layers, in
  any order, up to the number of the target's layers.
- `d2t` is int64 and holds target ids; without it the draft vocabulary is the target's.
- Norms are float32; queries and keys are rotated in neighbouring pairs.
- `norm_before_residual` and `norm_before_fc` are known; per-tap norms, fed-back norms, windows,
  biases and norms of queries and keys are not.
- The embedding is the target's when the file has none.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from fledge.interop.engine_view import EngineView, Files, build, require
from fledge.interop.gguf_export import ARCHITECTURE, HEAD_FILE
from fledge.interop.gguf_names import LAYER_NAMES, unpair_rows
from fledge.models.head_config import HeadConfig

_NAMES = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "token_embd.weight": "embed_tokens.weight",
}
_MODULES = {ours: module for module, ours in LAYER_NAMES.items()}
_FACTORS = "rope_freqs.weight"
_BLOCK_TYPES = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0)


def read_as_llamacpp(directory: Path, scaling: dict[str, Any] | None) -> EngineView:
    """The head that llama.cpp runs; `scaling` says which rotation the factors must stand for."""
    reader = GGUFReader(directory / HEAD_FILE)

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key.format(arch=ARCHITECTURE))
        return default if field is None else field.contents()

    require(value("general.architecture") == ARCHITECTURE, directory, "not an eagle3 file.")
    require(value("{arch}.block_count") == 1, directory, "an EAGLE-3 head has 1 block.")
    taps = tuple(value("{arch}.target_layers", ()))
    require(len(taps) == 3, directory, f"llama.cpp wants 3 target_layers, not {list(taps)}.")
    num_tokens = len(value("tokenizer.ggml.tokens", ()))
    stored = {tensor.name: _values(tensor) for tensor in reader.tensors}
    ids = stored.pop("d2t", torch.arange(num_tokens))
    require(ids.dtype == torch.int64, directory, "d2t must be int64.")
    config = HeadConfig(
        hidden_size=value("{arch}.embedding_length"),
        target_hidden_size=value("{arch}.target_hidden_size"),
        intermediate_size=value("{arch}.feed_forward_length"),
        num_heads=value("{arch}.attention.head_count"),
        num_kv_heads=value("{arch}.attention.head_count_kv"),
        head_dim=value("{arch}.attention.key_length"),
        vocab_size=num_tokens,
        draft_vocab_size=len(ids),
        rms_norm_eps=_float32(value("{arch}.attention.layer_norm_rms_epsilon")),
        max_position_embeddings=value("{arch}.context_length"),
        rope_theta=_float32(value("{arch}.rope.freq_base")),
        rope_scaling=_scaling(directory, value, stored, scaling),
        taps=taps,
        norm_before_residual=bool(value("{arch}.norm_before_residual", False)),
        norm_before_fc=bool(value("{arch}.norm_before_fc", False)),
    )
    files = Files(directory, {}, {})
    # Norms are float32 in the file, whatever the head's type: computed with, they are the same.
    dtype = stored["fc.weight"].dtype
    tensors = {_our_name(files, name): tensor.to(dtype) for name, tensor in stored.items()}
    for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        key = f"midlayer.self_attn.{name}.weight"
        tensors[key] = unpair_rows(tensors[key], heads)
    tensors["d2t"] = ids - torch.arange(len(ids))
    return EngineView(build(files, config, tensors), taps)


def _values(tensor: Any) -> Tensor:
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        bits = torch.from_numpy(np.array(tensor.data).view(np.uint8))
        return bits.view(torch.bfloat16).reshape(tuple(int(n) for n in tensor.shape[::-1]))
    if tensor.tensor_type in _BLOCK_TYPES:
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    return torch.from_numpy(np.array(tensor.data))


def _float32(number: float) -> float:
    """GGUF holds float32; the shortest decimal that means the same is what was written."""
    return float(str(np.float32(number)))


def _scaling(
    directory: Path, value: Any, stored: dict[str, Tensor], expected: dict[str, Any] | None
) -> dict[str, Any] | None:
    factors = stored.pop(_FACTORS, None)
    kind = (expected or {}).get("rope_type", "default")
    require((factors is not None) == (kind == "llama3"), directory, "rope_freqs for llama3 only.")
    if kind == "llama3":
        return expected
    if value("{arch}.rope.scaling.type", "none") == "none":
        return None
    factor = _float32(value("{arch}.rope.scaling.factor"))
    return {"rope_type": value("{arch}.rope.scaling.type"), "factor": factor}


def _our_name(files: Files, name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    module = name.removeprefix("blk.0.").removesuffix(".weight")
    require(module in _MODULES, files.directory, f"llama.cpp does not know the tensor {name}.")
    return f"midlayer.{_MODULES[module]}.weight"
