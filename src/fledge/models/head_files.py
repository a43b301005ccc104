"""Heads on disk, in the public EAGLE-3 layout: strict in both directions.

Reads the layouts of SafeAILab, SpecForge and Model-Optimizer (a Llama-like config.json) and of
speculators (a nested one). Every tensor must be known, present and of the right shape; nothing is
skipped quietly. Writes the first layout, with the keys vLLM and SGLang look for.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_dialects import config_to_json, json_to_config
from fledge.models.quiet import first_line
from fledge.models.target import Target
from fledge.store.cache_publish import publish_directory

_WEIGHTS = "model.safetensors"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_CONFIG = "config.json"
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_OFFSETS, _MEMBERS, _EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
_INTEGERS = (torch.int64, torch.int32, torch.int16)


def load_head(directory: Path) -> Eagle3Head:
    """Read a head as it is stored; `fit_to_target` checks it and moves it beside a target."""
    config = json_to_config(_read_config(directory), where=str(directory / _CONFIG))
    tensors = _by_our_names(directory, _read_weights(directory))
    offsets, members = tensors.pop(_OFFSETS, None), tensors.pop(_MEMBERS, None)
    _check_types(directory, tensors)
    embedding = tensors.pop(_EMBEDDING, None)
    head = _empty_head(directory, config)
    _check_tensors(directory, head.state_dict(), tensors)
    head.load_state_dict(tensors, strict=True, assign=True)
    head.draft_to_target_V = _vocabulary(directory, config, offsets, members)
    head.own_embedding = embedding
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
    place = (target.device, target.dtype)
    if all((weight.device, weight.dtype) == place for weight in head.parameters()):
        return head
    # `to` changes a module in place, and the caller's head may serve elsewhere too.
    return copy.deepcopy(head).to(device=target.device, dtype=target.dtype)


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
    save_file(_tensors_to_save(head), directory / _WEIGHTS, metadata={"format": "pt"})
    # The writer makes its file private, unlike every other file here.
    (directory / _WEIGHTS).chmod((directory / _CONFIG).stat().st_mode)


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
    size = head.config.draft_vocab_size
    targets_V = head.draft_to_target_V.cpu()
    members = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    members[targets_V] = True
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    tensors |= {_OFFSETS: targets_V - torch.arange(size), _MEMBERS: members}
    if head.own_embedding is not None:
        tensors[_EMBEDDING] = head.own_embedding.cpu()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    if not directory.is_dir():
        raise ArtifactError(f"there is no head directory {directory}.")
    if not path.is_file():
        raise ArtifactError(f"{directory} has no config.json; it is not a head directory.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} holds a {type(data).__name__}, not an object.")
    return data


def _read_weights(directory: Path) -> dict[str, Tensor]:
    path, pickled = directory / _WEIGHTS, directory / _PICKLED_WEIGHTS
    if path.is_file():
        return dict(_attempt(load_file, path))
    if pickled.is_file():
        return _plain_weights(pickled, _attempt(_unpickle, pickled))
    raise ArtifactError(f"{directory} has neither {_WEIGHTS} nor {_PICKLED_WEIGHTS}.")


def _unpickle(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)


def _attempt(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
    except (SafetensorError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path} is damaged or truncated: {first_line(error)}") from error
    except Exception as error:  # the unpickler refuses what is not weights with its own class
        raise ArtifactError(
            f"{path} does not hold plain weights: {type(error).__name__}"
        ) from error


def _plain_weights(path: Path, content: object) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise ArtifactError(
            f"{path} does not hold plain weights: it is a {type(content).__name__}, not a table "
            "of tensors by name."
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ArtifactError(
                f"{path} does not hold plain weights: the entry {name!r} is a "
                f"{type(value).__name__}; every entry must be a tensor under a name."
            )
    return dict(content)


def _by_our_names(directory: Path, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names; two of one name would make it a matter of luck which is used."""
    sources: dict[str, str] = {}
    for name in stored:
        other = sources.setdefault(_canonical(name), name)
        if other != name:
            raise MismatchError(
                f"{other!r} and {name!r} in {directory} are names of the same tensor "
                f"({_canonical(name)}); remove one of them."
            )
    return {ours: stored[name] for ours, name in sources.items()}


def _canonical(name: str) -> str:
    """Our name of a tensor: no `model.` in front, the layer called midlayer."""
    name = name.removeprefix("model.")
    for prefix in _LAYER_PREFIXES:
        if name.startswith(prefix):
            return "midlayer." + name.removeprefix(prefix)
    return name


def _check_types(directory: Path, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise MismatchError(
                f"{name} in {directory} is of type {_type_name(tensor)}; the weights of a head "
                "are floating-point numbers. Export the head without quantisation."
            )


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
            raise MismatchError(
                f"{name} in {directory} has shape {list(found[name].shape)}; its config.json "
                f"implies {list(tensor.shape)}."
            )


def _vocabulary(
    directory: Path, config: HeadConfig, offsets: Tensor | None, members: Tensor | None
) -> Tensor:
    """Target ids of the draft tokens, checked against the target's vocabulary."""
    targets_V = _draft_to_target(directory, config, offsets)
    if members is not None:
        _check_members(directory, config, members, targets_V)
    return targets_V


def _draft_to_target(directory: Path, config: HeadConfig, offsets: Tensor | None) -> Tensor:
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if size != vocab_size:
            raise ArtifactError(
                f"{directory} has no {_OFFSETS} table, but a draft vocabulary of {size} tokens "
                f"for a target of {vocab_size}."
            )
        return torch.arange(size)
    if offsets.dtype not in _INTEGERS:
        raise MismatchError(
            f"{_OFFSETS} in {directory} is of type {_type_name(offsets)}; offsets between token "
            "ids are whole numbers (int64)."
        )
    if offsets.shape != (size,):
        raise MismatchError(
            f"{_OFFSETS} in {directory} has shape {list(offsets.shape)}; "
            f"draft_vocab_size says [{size}]."
        )
    targets_V = torch.arange(size) + offsets.long()
    low, high = int(targets_V.min()), int(targets_V.max())
    if low < 0 or high >= vocab_size:
        raise MismatchError(
            f"{_OFFSETS} in {directory} maps to target ids {low} to {high}; the target's "
            f"vocabulary has ids 0 to {vocab_size - 1}."
        )
    if torch.unique(targets_V).numel() != size:
        raise MismatchError(f"{_OFFSETS} in {directory} maps two draft tokens to one target id.")
    return targets_V


def _check_members(directory: Path, config: HeadConfig, members: Tensor, targets_V: Tensor) -> None:
    if members.shape != (config.vocab_size,):
        raise MismatchError(
            f"{_MEMBERS} in {directory} has shape {list(members.shape)}; vocab_size says "
            f"[{config.vocab_size}]."
        )
    is_flags = members.dtype == torch.bool
    if not is_flags and (members.dtype != torch.uint8 or int(members.max()) > 1):
        raise MismatchError(
            f"{_MEMBERS} in {directory} is of type {_type_name(members)}, up to "
            f"{members.max().item()}; it must be bool, or uint8 with 0 and 1."
        )
    if not torch.equal(members.nonzero()[:, 0], targets_V.sort().values):
        raise MismatchError(f"{_MEMBERS} and {_OFFSETS} in {directory} name different tokens.")
