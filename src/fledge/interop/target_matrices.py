"""The two matrices of a target that heads share, read from its weight files and nothing else."""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.interop.target_facts import TargetFacts
from fledge.models.head import Eagle3Head
from fledge.models.target_loading import load_config
from fledge.models.target_reading import Readout, logit_scale
from fledge.models.turned_rows import target_rows

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


def with_target_rows(
    head: Eagle3Head, target: TargetFacts | None, *, where: str | Path
) -> Eagle3Head:
    """An ordinary head of one whose output rows are the target's, turned."""
    if target is None:
        raise ConfigError(
            f"{where} has turned_rows: its output rows are the target's, turned by its matrix "
            "lm_head.turn. Name the target with --target, so that other engines get whole rows."
        )
    config = load_config(target.directory).get_text_config()
    readout = Readout(read_lm_head(target), scale=logit_scale(config))
    return head.with_own_rows(target_rows(readout, head.draft_to_target_V))


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
