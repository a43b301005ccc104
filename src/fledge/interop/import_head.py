"""`import_head`: a head that others wrote, made one of ours.

Heads in public layouts load as they are; importing adds what such a directory may lack (rows of the
target as `lm_head`), fetches it from the hub, compares it with its target, and writes our layout.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.interop.target_facts import TargetFacts, check_belongs, read_target_facts
from fledge.interop.target_matrices import read_embedding, read_lm_head
from fledge.models.head import Eagle3Head
from fledge.models.head_files import HeadParts, assemble, load_head, read_parts, save_head
from fledge.models.hub import fetch_head_from_hub
from fledge.store.capacity import translated_disk_errors

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What was read, and what became of it."""

    directory: Path
    source: Path
    layout: str
    """Whose layout it was, as far as the files tell."""

    num_tensors: int
    taps: tuple[int, ...] | None
    """Completed target layers it reads; None: the default."""

    notes: tuple[str, ...] = ()


def import_head(
    source: str | Path,
    out: Path,
    *,
    target: str | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Read a head in any public layout and write it as one of ours; every tensor is used."""
    if out.exists():
        raise ArtifactError(f"{out} exists already; choose another place for the head.")
    directory = find_source(source, progress or SilentProgress())
    parts = read_parts(directory)
    facts = None if target is None else read_target_facts(target, progress=progress)
    if facts is not None:
        check_belongs(parts.config, facts)
    head, notes = _complete(parts, facts)
    with translated_disk_errors(out, place="head"):
        save_head(head, out)
    load_head(out)
    return ImportReport(
        directory=out,
        source=directory,
        layout=name_layout(directory),
        num_tensors=len(head.state_dict()),
        taps=head.config.taps,
        notes=notes,
    )


def find_source(source: str | Path, progress: Progress) -> Path:
    """A local directory, or the files of a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{path} is a file; give the directory that holds it and config.json.")
    if _HUB_ID.fullmatch(str(source)):
        return fetch_head_from_hub(str(source), progress)
    raise ArtifactError(
        f"there is no head directory {source}. Give a directory, or a Hugging Face id (owner/name)."
    )


def _complete(parts: HeadParts, target: TargetFacts | None) -> tuple[Eagle3Head, tuple[str, ...]]:
    """The whole head, and what was done to make it so."""
    notes: list[str] = []
    lm_head = None
    if parts.needs_lm_head:
        if target is None:
            raise ConfigError(
                f"{parts.directory} has no lm_head.weight: its logits are made with the target's. "
                "Name the target with --target, so that its rows can be added."
            )
        matrix = read_embedding(target) if parts.is_tied else read_lm_head(target)
        if matrix.shape[1] != parts.config.hidden_size:
            raise MismatchError(
                f"{parts.directory} has no lm_head.weight, and the target's has rows of "
                f"{matrix.shape[1]} values; the head's hidden size is {parts.config.hidden_size}."
            )
        lm_head = matrix[parts.draft_to_target_V].to(parts.tensors["fc.weight"].dtype)
        what = "embedding" if parts.is_tied else "lm_head"
        notes.append(f"lm_head: {len(lm_head)} rows of the target's {what} were added.")
    head = assemble(parts, lm_head)
    own = head.own_embedding
    if own is not None and target is not None and _is_the_targets(own, target):
        head.own_embedding = None
        notes.append("embedding: the same as the target's, so it is shared instead of stored.")
    if target is None:
        notes.append("no target was named, so that layers and sizes were not compared with one.")
    return head, tuple(notes)


def _is_the_targets(embedding: torch.Tensor, target: TargetFacts) -> bool:
    try:
        theirs = read_embedding(target)
    except ArtifactError:
        return False  # a target without weights beside its config: nothing to compare with
    return theirs.shape == embedding.shape and torch.equal(theirs.to(embedding.dtype), embedding)


def name_layout(directory: Path) -> str:
    """Whose layout a directory has, by the keys of its config.json."""
    data: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    eagle = data.get("eagle_config") or {}
    if "transformer_layer_config" in data:
        return "speculators"
    if "next_layer_regular" in eagle or "use_last_layernorm" in eagle:
        return "Model-Optimizer"
    if "norm_before_residual" in data and "rope_parameters" in data:
        return "fledge"
    names = data.get("architectures") or ()
    return "SpecForge" if "LlamaForCausalLMEagle3" in names else "SafeAILab"
