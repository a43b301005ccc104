"""Heads on disk, in the public EAGLE-3 layout: strict in both directions.

Reads the layouts of SafeAILab, SpecForge and Model-Optimizer (a Llama-like config.json) and of
speculators (a nested one). Every tensor must be known, present and of the right shape; nothing is
skipped quietly. Writes the first layout, with the keys vLLM and SGLang look for.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from fledge.contracts.errors import ArtifactError, CapacityError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_dialects import config_to_json, json_to_config, ties_embeddings
from fledge.models.head_vocabulary import (
    COMMON,
    MEMBERS,
    OFFSETS,
    check_common,
    read_vocabulary,
    type_name,
    vocabulary_tensors,
)
from fledge.models.head_weights import WEIGHTS, read_weights
from fledge.models.quiet import first_line
from fledge.models.target import Target
from fledge.models.turned_rows import target_rows
from fledge.store.cache_publish import publish_directory
from fledge.store.capacity import format_bytes
from fledge.store.manifest import MANIFEST_NAME
from fledge.store.stage_directory import PLAN_NAME

_CONFIG = "config.json"
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"
_FREQUENCIES = "midlayer.self_attn.rotary_emb.inv_freq"


class HeadParts(NamedTuple):
    """A stored head before it is put together; its `lm_head` may be the target's."""

    directory: Path
    config: HeadConfig
    tensors: dict[str, Tensor]
    draft_to_target_V: Tensor
    embedding: Tensor | None
    is_tied: bool
    """The logits are made with rows of the embedding."""

    common_V: Tensor | None

    @property
    def needs_lm_head(self) -> bool:
        """Whether rows of the target must become the head's `lm_head`."""
        return _LM_HEAD not in self.tensors and not self.config.turned_rows


def load_head(directory: Path) -> Eagle3Head:
    """Read a head as it is stored; `fit_to_target` checks it and moves it beside a target."""
    parts = read_parts(directory)
    if parts.needs_lm_head:
        raise ArtifactError(
            f"{directory} has no {_LM_HEAD}: its logits are made with the target's. Add the "
            f"target's rows with: fledge import {directory} --target TARGET --out NEW"
        )
    return assemble(parts)


def read_parts(directory: Path) -> HeadParts:
    """Read a head's files, every tensor known and of a type that weights may have."""
    data = _read_config(directory)
    where = str(directory / _CONFIG)
    config = json_to_config(data, where=where)
    tensors = read_weights(directory)
    offsets, members = tensors.pop(OFFSETS, None), tensors.pop(MEMBERS, None)
    common = tensors.pop(COMMON, None)
    _check_types(directory, tensors)
    # Layers with biases have one behind attention in some libraries and none in others.
    config = dataclasses.replace(config, output_bias=_OUTPUT_BIAS in tensors)
    targets_V = read_vocabulary(directory, config, offsets, members)
    embedding, is_tied = tensors.pop(_EMBEDDING, None), ties_embeddings(data, where=where)
    if is_tied and embedding is not None and _LM_HEAD not in tensors:
        tensors[_LM_HEAD] = embedding[targets_V]
    if common is not None:
        check_common(directory, config, common)
    return HeadParts(directory, config, tensors, targets_V, embedding, is_tied, common)


def assemble(parts: HeadParts, lm_head_VD: Tensor | None = None) -> Eagle3Head:
    """Put a head together; `lm_head` where the checkpoint brings none."""
    tensors = dict(parts.tensors)
    if lm_head_VD is not None:
        tensors[_LM_HEAD] = lm_head_VD
    head = _empty_head(parts.directory, parts.config)
    _check_frequencies(parts.directory, head, tensors)
    _check_tensors(parts.directory, head.state_dict(), tensors)
    head.load_state_dict(tensors, strict=True, assign=True)
    head.draft_to_target_V = parts.draft_to_target_V
    head.own_embedding = parts.embedding
    head.common_V = parts.common_V
    return head.eval()


def fit_to_target(head: Eagle3Head, target: Target) -> Eagle3Head:
    """Check that a head belongs to a target, and put it beside it: same device, same dtype."""
    config = head.config
    pairs = (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
    )
    for name, wanted, actual in pairs:
        if wanted != actual:
            raise MismatchError(
                f"the head was made for a target with {name} {wanted}; this target has {actual}."
            )
    embedding = head.own_embedding
    shape = list(target.embedding.weight.shape if embedding is None else embedding.shape)
    if shape != [config.vocab_size, config.hidden_size]:
        raise MismatchError(
            f"the head reads embeddings of shape {[config.vocab_size, config.hidden_size]}; "
            f"{'the target' if embedding is None else 'its checkpoint'} brings {shape}."
        )
    target.check_taps(config.resolve_taps(target.num_layers))
    if config.turned_rows:
        head = head.with_own_rows(target_rows(target.readout, head.draft_to_target_V))
    if head.common_V is not None and target.device.type == "cpu":
        # A core pays for every row of the output matrix.
        head = head.of_common_tokens()
    place = (target.device, target.dtype)
    if all((weight.device, weight.dtype) == place for weight in head.parameters()):
        return head
    # `to` changes a module in place, and the caller's head may serve elsewhere too.
    copied = copy.deepcopy(head)
    try:
        return copied.to(device=target.device, dtype=target.dtype)
    except torch.OutOfMemoryError as error:
        num_bytes = sum(weight.numel() for weight in head.parameters()) * target.dtype.itemsize
        raise CapacityError(
            f"the head needs {format_bytes(num_bytes)} on {target.device}, beside the target, and "
            "they are not free there; end what else uses the device, or go without a head."
        ) from error


def save_head(head: Eagle3Head, directory: Path) -> None:
    """Write a head so that it is there whole or not at all; never over an existing one."""
    _refuse_existing(directory)
    with publish_directory(directory) as staging:
        write_head_files(head, staging)
        # Publishing replaces what has come to be there while the weights were written.
        _refuse_existing(directory)


def write_head_files(head: Eagle3Head, directory: Path) -> None:
    """Write a head's files into a directory that the caller publishes."""
    text = json.dumps(config_to_json(head.config), indent=2) + "\n"
    (directory / _CONFIG).write_text(text, encoding="utf-8")
    save_file(_tensors_to_save(head), directory / WEIGHTS, metadata={"format": "pt"})
    # The writer makes its file private, unlike every other file here.
    (directory / WEIGHTS).chmod((directory / _CONFIG).stat().st_mode)


def _refuse_existing(directory: Path) -> None:
    if directory.exists():
        raise ArtifactError(f"{directory} exists already; choose another place for the head.")


def _empty_head(directory: Path, config: HeadConfig) -> Eagle3Head:
    """The head that a config describes, without memory for its weights."""
    try:
        with torch.device("meta"):
            return Eagle3Head(config)
    except Exception as error:  # transformers reads the rope parameters, torch the sizes
        raise ArtifactError(
            f"{directory / _CONFIG} describes a head that cannot be built (rope parameters "
            f"{config.rope_scaling}, head_dim {config.head_dim}): {first_line(error)}"
        ) from error


def _tensors_to_save(head: Eagle3Head) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    tensors |= vocabulary_tensors(head.draft_to_target_V, head.config.vocab_size)
    if head.own_embedding is not None:
        tensors[_EMBEDDING] = head.own_embedding.cpu()
    if head.common_V is not None:
        tensors[COMMON] = head.common_V.cpu()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    if directory.is_file():
        raise ArtifactError(f"{directory} is a file; give the directory that holds a head's files.")
    if not directory.is_dir():
        raise ArtifactError(f"there is no head directory {directory}.")
    if not path.is_file():
        raise ArtifactError(f"{directory} has no config.json; {_what_else(directory)}.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} holds a {type(data).__name__}, not an object.")
    return data


def _what_else(directory: Path) -> str:
    """What a directory without a head is instead, as far as its files tell."""
    if (directory / PLAN_NAME).is_file() and not (directory / MANIFEST_NAME).is_file():
        return "a run in it is unfinished: start it again as before, and it goes on"
    if (directory / "train" / _CONFIG).is_file():
        return f"the head of this run is {directory / 'train'}"
    return "it is not a head directory"


def _check_types(directory: Path, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise MismatchError(
                f"{name} in {directory} is of type {type_name(tensor)}; the weights of a head "
                "are floating-point numbers. Export the head without quantisation."
            )


def _check_frequencies(directory: Path, head: Eagle3Head, tensors: dict[str, Tensor]) -> None:
    """Old checkpoints hold the rotation frequencies too; they must be those of the config."""
    stored = tensors.pop(_FREQUENCIES, None)
    if stored is None:
        return
    ours = head.midlayer.self_attn.frequencies(torch.device("cpu"))
    if stored.shape != ours.shape or not torch.allclose(stored.float(), ours, rtol=1e-2):
        raise MismatchError(
            f"{_FREQUENCIES} in {directory} is not what its config.json implies (rope_theta "
            f"{head.config.rope_theta}, rope_scaling {head.config.rope_scaling})."
        )


def _check_tensors(directory: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    missing, unknown = (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
    )
    if missing or unknown:
        raise MismatchError(
            f"the tensors in {directory} are not those its config.json describes: "
            f"missing {missing or 'none'}, unknown {unknown or 'none'}."
        )
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            is_turned = found[name].shape == tensor.shape[::-1]
            raise MismatchError(
                f"{name} in {directory} has shape {list(found[name].shape)}; its config.json "
                f"implies {list(tensor.shape)}{': it is transposed' if is_turned else ''}."
            )
