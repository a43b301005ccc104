"""A saved head whose files a test can change before it is loaded, and how heads are compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head, save_head

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Files:
    """A saved head whose files can be changed before it is loaded."""

    def __init__(self, directory: Path, head: Eagle3Head) -> None:
        self.directory = directory
        save_head(head, directory)
        self.config: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        self.tensors: dict[str, Tensor] = load_file(directory / WEIGHTS)

    def load(self) -> Eagle3Head:
        self.write()
        return load_head(self.directory)

    def write(self) -> None:
        self.write_config()
        save_file(self.tensors, self.directory / WEIGHTS)

    def write_config(self) -> None:
        (self.directory / CONFIG).write_text(json.dumps(self.config))

    def rename(self, rule: Callable[[str], str]) -> None:
        self.tensors = {rule(name): tensor for name, tensor in self.tensors.items()}

    def split(self, *, is_pickled: bool = False) -> Path:
        """The weights in two files with an index; returns the index."""
        (self.directory / WEIGHTS).unlink()
        stem, ending = ("pytorch_model", "bin") if is_pickled else ("model", "safetensors")
        names = sorted(self.tensors)
        files = {
            f"{stem}-{number:05}-of-00002.{ending}": names[number - 1 :: 2] for number in (1, 2)
        }
        for file, held in files.items():
            (torch.save if is_pickled else save_file)(
                {name: self.tensors[name] for name in held}, self.directory / file
            )
        index = self.directory / f"{stem}.{ending}.index.json"
        weight_map = {name: file for file, held in files.items() for name in held}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return index

    def write_pickle(self, content: object) -> Path:
        (self.directory / WEIGHTS).unlink()
        path = self.directory / "pytorch_model.bin"
        torch.save(content, path)
        return path


def assert_same(one: Eagle3Head, other: Eagle3Head) -> None:
    assert one.config == other.config
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name])
    assert torch.equal(one.draft_to_target_V, other.draft_to_target_V)
    assert (one.own_embedding is None) == (other.own_embedding is None)
    if one.own_embedding is not None:
        assert torch.equal(one.own_embedding, other.own_embedding)
