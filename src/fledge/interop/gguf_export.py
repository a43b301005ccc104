"""A head for llama.cpp: `head.gguf`, and `target.gguf` where the target is no GGUF file yet.

Written as llama.cpp reads it: layers counted as completed layers, `d2t` as target ids instead of
offsets, norms in float32, the target's vocabulary in both files.
"""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from fledge.contracts.dialects import HeadPrecision
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.contracts.progress import Progress
from fledge.interop.gguf_names import LAYER_NAMES, pair_rows, stored_type, stored_values
from fledge.interop.gguf_rope import FACTORS, add_rope, check_rope, rope_factors
from fledge.interop.gguf_rounding import block_type, round_to_blocks
from fledge.interop.gguf_target import CONVERTIBLE, write_target
from fledge.interop.gguf_tokens import add_vocabulary, copy_vocabulary
from fledge.interop.limits import (
    bias_limit,
    num_taps_limit,
    qk_norm_limit,
    refuse,
    tap_norm_limit,
    window_limit,
)
from fledge.interop.target_facts import TargetFacts
from fledge.models.head import Eagle3Head
from fledge.models.resolve import copy_gguf

HEAD_FILE, TARGET_FILE = "head.gguf", "target.gguf"
ARCHITECTURE = "eagle3"
_READS_LAYERS = frozenset(
    {"llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "gemma4", "lfm2"}
    | {"minimax_m2", "nemotron_h"}
)
"""Targets whose layers llama.cpp can hand over (August 2026)."""


def check_gguf(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what llama.cpp would misread."""
    config, engine = head.config, "llama.cpp"
    if target is None:
        raise ConfigError(
            "a GGUF head holds its target's vocabulary and layer numbers; name the target with "
            "--target."
        )
    limits = (bias_limit, qk_norm_limit, window_limit, tap_norm_limit, num_taps_limit)
    refuse(engine, (limit(config, engine) for limit in limits))
    check_rope(config.rope_scaling, "the head")
    taps = config.resolve_taps(target.num_layers)
    if max(taps) == target.num_layers:
        raise MismatchError(
            f"the head reads the target after {list(taps)} completed layers; of the last one "
            "llama.cpp hands over the normed state, which the head was not trained on. Train it on "
            f"layers below {target.num_layers} (capture.layers), or export it for vLLM."
        )
    if not target.model_types & _READS_LAYERS:
        raise MismatchError(
            f"llama.cpp cannot hand over the layers of {target.model_type} targets; it can for "
            f"{', '.join(sorted(_READS_LAYERS))}. Export the head for vLLM or OpenVINO."
        )


def write_gguf(
    head: Eagle3Head,
    directory: Path,
    target: TargetFacts,
    *,
    precision: HeadPrecision | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the head's file and, unless the target is a GGUF file already, the target's."""
    given, written = Path(target.name).expanduser(), directory / TARGET_FILE
    vocabulary: Path | None = given
    if not given.is_file():
        vocabulary = written
        if not copy_gguf(target.name, written, progress=progress):
            require_convertible(target)
            write_target(target, written)
            vocabulary = None
    write_head(head, directory / HEAD_FILE, target, vocabulary=vocabulary, precision=precision)


def require_convertible(target: TargetFacts) -> None:
    if not target.model_types & CONVERTIBLE:
        raise MismatchError(
            f"a {target.model_type} target is not written as GGUF here ("
            f"{', '.join(sorted(CONVERTIBLE))} are); convert it with llama.cpp's own converter "
            "and give the file as --target."
        )


def write_head(
    head: Eagle3Head,
    path: Path,
    target: TargetFacts,
    *,
    vocabulary: Path | None,
    precision: HeadPrecision | None,
) -> None:
    """Write `head.gguf`, with the tokens of a GGUF file or of the target's directory."""
    writer = GGUFWriter(path, ARCHITECTURE)
    _add_settings(writer, head, target)
    if vocabulary is None:
        add_vocabulary(writer, target.directory, target.vocab_size)
    else:
        copy_vocabulary(writer, vocabulary)
    for name, tensor in _tensors(head).items():
        kind = block_type(tensor, precision)
        if kind is None:
            writer.add_tensor(name, stored_values(tensor), raw_dtype=stored_type(tensor))
        else:
            writer.add_tensor(name, round_to_blocks(tensor, kind), raw_dtype=kind)
    targets_V = head.draft_to_target_V.cpu()
    if not torch.equal(targets_V, torch.arange(head.config.vocab_size)):
        ids = targets_V.numpy().astype(np.int64)
        writer.add_tensor("d2t", ids, raw_dtype=GGMLQuantizationType.I64)
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: GGUFWriter, head: Eagle3Head, target: TargetFacts) -> None:
    config = head.config
    writer.add_name("EAGLE-3 draft head")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(target.vocab_size)
    add_rope(
        writer,
        theta=config.rope_theta,
        head_dim=config.head_dim,
        scaling=config.rope_scaling,
    )
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(config.resolve_taps(target.num_layers)))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", config.target_hidden_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", config.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", config.norm_before_fc)


_NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_norm.weight": "enc.output_norm.weight",
}


def _tensors(head: Eagle3Head) -> dict[str, Tensor]:
    config = head.config
    heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        values = tensor.detach().cpu()
        if name in _NAMES:
            tensors[_NAMES[name]] = values
            continue
        module = name.removeprefix("midlayer.").removesuffix(".weight")
        if module in heads:
            values = pair_rows(values, heads[module])
        tensors[f"blk.0.{LAYER_NAMES[module]}.weight"] = values
    if head.own_embedding is not None:
        tensors["token_embd.weight"] = head.own_embedding.cpu()
    factors = rope_factors(config.rope_scaling, theta=config.rope_theta, head_dim=config.head_dim)
    return tensors if factors is None else tensors | {FACTORS: factors}
