"""The draft vocabulary of a stored head: `d2t` as offsets, `t2d` as flags, checked against each
other and against the target's vocabulary."""

from pathlib import Path

import torch
from torch import Tensor

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.head_config import HeadConfig

OFFSETS, MEMBERS, COMMON = "d2t", "t2d", "common"
_INTEGERS = (torch.int64, torch.int32, torch.int16)


def read_vocabulary(
    directory: Path, config: HeadConfig, offsets: Tensor | None, members: Tensor | None
) -> Tensor:
    """Target ids of the draft tokens, checked against the target's vocabulary."""
    targets_V = _draft_to_target(directory, config, offsets)
    if members is not None:
        _check_members(directory, config, members, targets_V)
    return targets_V


def check_common(directory: Path, config: HeadConfig, common_V: Tensor) -> None:
    """Flags of the drafted tokens that are said often: fledge's own, other engines have no such."""
    if common_V.dtype != torch.bool or common_V.shape != (config.draft_vocab_size,):
        raise MismatchError(
            f"{COMMON} in {directory} is of type {type_name(common_V)} and shape "
            f"{list(common_V.shape)}; a flag (bool) for each of the {config.draft_vocab_size} "
            "drafted tokens is needed."
        )
    if not bool(common_V.any()):
        raise MismatchError(f"{COMMON} in {directory} names none of the drafted tokens.")


def vocabulary_tensors(draft_to_target_V: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Both tables, as every public layout but GGUF holds them."""
    targets_V = draft_to_target_V.cpu()
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[targets_V] = True
    return {OFFSETS: targets_V - torch.arange(len(targets_V)), MEMBERS: members}


def type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _draft_to_target(directory: Path, config: HeadConfig, offsets: Tensor | None) -> Tensor:
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if size != vocab_size:
            raise ArtifactError(
                f"{directory} has no {OFFSETS} table, but a draft vocabulary of {size} tokens "
                f"for a target of {vocab_size}."
            )
        return torch.arange(size)
    if offsets.dtype not in _INTEGERS:
        raise MismatchError(
            f"{OFFSETS} in {directory} is of type {type_name(offsets)}; offsets between token "
            "ids are whole numbers (int64)."
        )
    if offsets.shape != (size,):
        raise MismatchError(
            f"{OFFSETS} in {directory} has shape {list(offsets.shape)}; "
            f"draft_vocab_size says [{size}]."
        )
    targets_V = torch.arange(size) + offsets.long()
    low, high = int(targets_V.min()), int(targets_V.max())
    if low < 0 or high >= vocab_size:
        raise MismatchError(
            f"{OFFSETS} in {directory} maps to target ids {low} to {high}; the target's "
            f"vocabulary has ids 0 to {vocab_size - 1}."
        )
    if torch.unique(targets_V).numel() != size:
        raise MismatchError(f"{OFFSETS} in {directory} maps two draft tokens to one target id.")
    return targets_V


def _check_members(directory: Path, config: HeadConfig, members: Tensor, targets_V: Tensor) -> None:
    if members.shape != (config.vocab_size,):
        raise MismatchError(
            f"{MEMBERS} in {directory} has shape {list(members.shape)}; vocab_size says "
            f"[{config.vocab_size}]."
        )
    is_flags = members.dtype == torch.bool
    if not is_flags and (members.dtype != torch.uint8 or int(members.max()) > 1):
        raise MismatchError(
            f"{MEMBERS} in {directory} is of type {type_name(members)}, up to "
            f"{members.max().item()}; it must be bool, or uint8 with 0 and 1."
        )
    if not torch.equal(members.nonzero()[:, 0], targets_V.sort().values):
        raise MismatchError(f"{MEMBERS} and {OFFSETS} in {directory} name different tokens.")
