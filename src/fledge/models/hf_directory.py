"""Writes a model as a directory in Hugging Face format, and checks such directories.

The weights are written exactly as given. The check opens no tensor: it compares the sizes that
the files state with the sizes they have.
"""

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from fledge.contracts.errors import ArtifactError

_SHARD_SIZE = "4GB"
_INDEX = "model.safetensors.index.json"
_READABLE = 0o644


def save_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    eos_ids: tuple[int, ...],
    directory: Path,
) -> None:
    """config.json, generation_config.json and the weights, sharded when they are large."""
    # A model that came from a quantised file refuses to be saved in some versions, so the weights
    # move into a fresh one; on the meta device it takes no memory of its own.
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=list(eos_ids) if len(eos_ids) > 1 else eos_ids[0] if eos_ids else None,
        pad_token_id=config.pad_token_id,
    )
    try:
        model.save_pretrained(directory, max_shard_size=_SHARD_SIZE)
    except SafetensorError as error:
        raise _as_os_error(error, directory) from error
    for path in directory.glob("*.safetensors"):
        path.chmod(_READABLE)  # the writer makes them private, unlike every other file here


def _as_os_error(error: SafetensorError, directory: Path) -> Exception:
    """The system's error inside a safetensors one, so that a full disk is told as such."""
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), str(error), str(directory)) if code else error


def check_directory(directory: Path) -> None:
    """Refuse a directory that transformers could not load, saying which file is the matter."""
    if not (directory / "config.json").is_file():
        packed = next(iter(sorted(directory.glob("*.gguf"))), None)
        hint = f"; it holds {packed.name}: give that file" if packed else ""
        raise ArtifactError(
            f"{directory} is not a model directory: it has no config.json{hint}. A directory needs "
            "config.json, weights and tokenizer files in Hugging Face format."
        )
    files = tuple(_weight_files(directory))
    if not files:
        raise ArtifactError(
            f"{directory} has a config.json but no weights (*.safetensors or pytorch_model*.bin). "
            "Copy the weights there, or give another directory."
        )
    for path in files:
        _check_weight_file(path)


def _weight_files(directory: Path) -> Iterable[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ArtifactError(
                f"{index} cannot be read ({type(error).__name__}: {error}). Copy it again."
            ) from error
        return (directory / name for name in sorted(names))
    return sorted([*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")])


def _check_weight_file(path: Path) -> None:
    if not path.is_file():
        raise ArtifactError(
            f"{path.parent} is incomplete: {path.name} is listed in {_INDEX} and missing. "
            "Copy or download it again."
        )
    if path.suffix != ".safetensors":
        return
    expected, found = _stated_bytes(path), path.stat().st_size
    if expected != found:
        stated = "no readable header" if expected is None else f"a header for {expected} bytes"
        raise ArtifactError(
            f"{path} is damaged: it has {found} bytes and {stated}. Copy or download it again."
        )


def _stated_bytes(path: Path) -> int | None:
    """Size a safetensors file says it has; None when it does not say."""
    try:
        with path.open("rb") as file:
            (header_len,) = struct.unpack("<Q", file.read(8))
            if header_len > path.stat().st_size:
                return None
            header = json.loads(file.read(header_len))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if "dtype" in entry]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        return None
    return 8 + int(header_len) + max(ends, default=0)
