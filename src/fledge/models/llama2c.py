"""llama2.c data file to Hugging Face directory.

The file is a version-0 checkpoint (seven int32, then float32 weights) followed by the tokenizer
(longest token length, then score, length and bytes of each token).
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress
from fledge.models.hf_directory import save_model
from fledge.models.quiet import quiet_transformers
from fledge.models.tokenizer_files import build_sentencepiece, find_merges, wrap_backend

_HEADER = struct.Struct("<7i")
_NUM_STEPS = 2
_UNK, _BOS, _EOS = 0, 1, 2
_FIRST_BYTE_ID = 3
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class _Shape:
    """The checkpoint's header. D hidden, F inner, L layers, H heads, K key heads, V vocabulary."""

    D: int
    F: int
    L: int
    H: int
    K: int
    V: int
    context_len: int

    @property
    def head_dim(self) -> int:
        return self.D // self.H


def convert_llama2c(source: Path, directory: Path, *, progress: Progress) -> None:
    """Write the model and tokenizer of a llama2.c data file into an existing, empty directory."""
    data = source.read_bytes()
    shape = _read_shape(source, data)
    with (
        quiet_transformers(),
        progress.task("converting to float32", _NUM_STEPS, unit="steps") as task,
    ):
        weights, end = _read_weights(source, data, shape)
        # Training put BOS between texts, so that is what ends one.
        save_model(LlamaForCausalLM, _config(shape), weights, (_EOS, _BOS), directory)
        task.advance(1)
        _tokenizer(source, data[end:], shape.V).save_pretrained(directory)
        task.advance(1)


def _read_shape(source: Path, data: bytes) -> _Shape:
    values = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (0,) * 7
    shape = _Shape(*values)
    if min(values) < 1 or shape.D % shape.H or shape.H % shape.K:
        raise ArtifactError(
            f"{source} is not a llama2.c checkpoint: its first seven numbers are {values}. "
            "Only version-0 files with a shared output matrix can be read."
        )
    return shape


def _config(shape: _Shape) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.D,
        intermediate_size=shape.F,
        num_hidden_layers=shape.L,
        num_attention_heads=shape.H,
        num_key_value_heads=shape.K,
        head_dim=shape.head_dim,
        vocab_size=shape.V,
        max_position_embeddings=shape.context_len,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        pad_token_id=_UNK,
        dtype=torch.float32,
    )


def _layout(shape: _Shape) -> dict[str, tuple[int, ...]]:
    """Tensors in the order of the file; a leading L means one per layer."""
    kv = shape.K * shape.head_dim
    return {
        "embed": (shape.V, shape.D),
        "input_layernorm": (shape.L, shape.D),
        "self_attn.q_proj": (shape.L, shape.D, shape.D),
        "self_attn.k_proj": (shape.L, kv, shape.D),
        "self_attn.v_proj": (shape.L, kv, shape.D),
        "self_attn.o_proj": (shape.L, shape.D, shape.D),
        "post_attention_layernorm": (shape.L, shape.D),
        "mlp.gate_proj": (shape.L, shape.F, shape.D),
        "mlp.down_proj": (shape.L, shape.D, shape.F),
        "mlp.up_proj": (shape.L, shape.F, shape.D),
        "norm": (shape.D,),
        "rope_tables": (2, shape.context_len, shape.head_dim // 2),
    }


def _read_weights(source: Path, data: bytes, shape: _Shape) -> tuple[dict[str, torch.Tensor], int]:
    """Weights by their names in transformers, and where the tokenizer begins."""
    layout = _layout(shape)
    end = _HEADER.size + 4 * sum(int(np.prod(size)) for size in layout.values())
    if len(data) < end:
        raise ArtifactError(
            f"{source} is truncated: it has {len(data)} bytes, its header describes {end}. "
            "Fetch or copy it again."
        )
    weights: dict[str, torch.Tensor] = {}
    position = _HEADER.size
    for name, size in layout.items():
        count = int(np.prod(size))
        array = np.frombuffer(data, "<f4", count, position).reshape(size).copy()
        position += 4 * count
        _place(weights, name, torch.from_numpy(array), shape)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights, end


def _place(
    weights: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, shape: _Shape
) -> None:
    if name == "rope_tables":
        return  # transformers computes them
    if name == "embed":
        weights["model.embed_tokens.weight"] = tensor
    elif name == "norm":
        weights["model.norm.weight"] = tensor
    else:
        for layer_id, part in enumerate(tensor):
            rotated = name.endswith(("q_proj", "k_proj"))
            weights[f"model.layers.{layer_id}.{name}.weight"] = (
                _unpair(part, shape.head_dim) if rotated else part.clone()
            )


def _unpair(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama2.c rotates neighbours (0 1)(2 3), transformers halves (0 2)(1 3): reorder the rows."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _tokenizer(source: Path, data: bytes, vocab_size: int) -> PreTrainedTokenizerFast:
    pieces, scores = _read_pieces(source, data, vocab_size)
    plain = range(_FIRST_BYTE_ID + 256, vocab_size)
    backend = build_sentencepiece(pieces, find_merges(pieces, scores, plain))
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return wrap_backend(backend, roles, adds_bos=True)


def _read_pieces(source: Path, data: bytes, vocab_size: int) -> tuple[list[str], list[float]]:
    pieces: list[str] = []
    scores: list[float] = []
    position = 4
    try:
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, position)
            position += 8
            piece = data[position : position + length]
            if length < 0 or len(piece) != length:
                raise struct.error(f"a token of {length} bytes")
            position += length
            scores.append(score)
            pieces.append(_spell(len(pieces), piece))
    except (struct.error, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"the tokenizer in {source} ends or is damaged after {len(pieces)} of {vocab_size} "
            f"tokens ({error}). Fetch or copy it again."
        ) from error
    return pieces, scores


def _spell(token_id: int, piece: bytes) -> str:
    """A token as sentencepiece spells it; llama2.c writes bytes and spaces as they are."""
    if token_id in (_UNK, _BOS, _EOS):
        return ("<unk>", "<s>", "</s>")[token_id]
    if token_id < _FIRST_BYTE_ID + 256:
        return f"<0x{token_id - _FIRST_BYTE_ID:02X}>"
    return piece.decode().replace(" ", _SPACE)
