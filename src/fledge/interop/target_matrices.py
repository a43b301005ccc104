"""The two matrices of a target that heads share, read from its weight files and nothing else."""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from fledge.contracts.errors import ArtifactError
from fledge.interop.target_facts import TargetFacts

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_LM_HEAD = ("lm_head.weight", "embed_out.weight")


def read_embedding(target: TargetFacts) -> Tensor:
    """The input embedding, one row for each token."""
    return _require(_find(target.directory, _EMBEDDING), target, "embedding")


def read_lm_head(target: TargetFacts) -> Tensor:
    """The matrix that makes logits; the embedding where the target ties them."""
    config = json.loads((target.directory / "config.json").read_text(encoding="utf-8"))
    found = _find(target.directory, _LM_HEAD)
    if found is None and config.get("tie_word_embeddings", True):
        return read_embedding(target)
    return _require(found, target, "lm_head")


def _find(directory: Path, endings: tuple[str, ...]) -> Tensor | None:
    """The one tensor of a directory whose name ends in one of these ways."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (a file, not a dict)
                # Models that also see or hear have towers of their own, with other endings.
                if name.endswith(endings):
                    tensor: Tensor = stored.get_tensor(name)
                    return tensor
    return None


def _require(tensor: Tensor | None, target: TargetFacts, what: str) -> Tensor:
    if tensor is None:
        raise ArtifactError(
            f"{target.directory} has no {what} in safetensors files, which the head needs rows of. "
            "Give a target directory with its weights."
        )
    if tensor.shape[0] != target.vocab_size:
        raise ArtifactError(
            f"the {what} of {target.name} has {tensor.shape[0]} rows, its config.json says "
            f"{target.vocab_size} tokens."
        )
    return tensor
