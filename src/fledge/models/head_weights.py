"""Weight files of a head: safetensors or plain pickles, in one file or in several.

Pickles are read as plain weights only, so code inside one is refused and never run. Nothing is
skipped: a shard that is missing, or a tensor that its index does not know, is an error.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.quiet import first_line

WEIGHTS = "model.safetensors"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_INDEX_ENDING = ".index.json"
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_TAP_NORMS = {
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
"""What the norms of the taps were called before EAGLE-3.1 had a name."""


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a head, under our names."""
    return _by_our_names(directory, _read_files(directory))


def _read_files(directory: Path) -> dict[str, Tensor]:
    for name, read in ((WEIGHTS, _read_safetensors), (_PICKLED_WEIGHTS, _read_pickle)):
        if (directory / name).is_file():
            return read(directory / name)
        index = directory / (name + _INDEX_ENDING)
        if index.is_file():
            return _read_shards(index, read)
    raise ArtifactError(f"{directory} has neither {WEIGHTS} nor {_PICKLED_WEIGHTS}.")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    return dict(_attempt(load_file, path))


def _read_pickle(path: Path) -> dict[str, Tensor]:
    return _plain_weights(path, _attempt(_unpickle, path))


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


def _read_shards(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that an index names, each from the file it names, and no others."""
    files = _read_index(index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        path = index.parent / name
        if not path.is_file():
            raise ArtifactError(
                f"{index} names the file {name}, which is missing; fetch the whole head again."
            )
        found = read(path)
        expected = {tensor for tensor, file in files.items() if file == name}
        if found.keys() != expected:
            raise MismatchError(
                f"{path} does not hold the tensors that {index.name} says: missing "
                f"{sorted(expected - found.keys()) or 'none'}, unknown "
                f"{sorted(found.keys() - expected) or 'none'}."
            )
        tensors |= found
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        is_plain = all(Path(name).name == name for name in files.values()) and bool(files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index} is not an index of weight files: {error!r}") from error
    if not is_plain:
        raise ArtifactError(f"{index} must name files beside it, without directories.")
    return dict(files)


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
    first, _, rest = name.partition(".")
    return f"{_TAP_NORMS[first]}.{rest}" if first in _TAP_NORMS else name
