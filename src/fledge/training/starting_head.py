"""A head that training goes on from: other data, another loss, another draft vocabulary.

Its layer is taken as it is. A wider MLP and more attention heads begin by doing the same: what is
new reads at random and writes nothing yet. Output rows are taken by token: a token that it did not
draft before begins with the target's own row, like those of a new head. Turned rows are the
target's anyway.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from fledge.contracts.errors import MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import load_head

_MAY_DIFFER = ("draft_vocab_size", "max_position_embeddings", "taps")
_READERS = tuple(f"{name}_proj.weight" for name in ("gate", "up", "q", "k", "v"))
_WRITERS = ("down_proj.weight", "o_proj.weight")
_REMEDIES = {
    "intermediate_size": "--set train.head.mlp_width={}",
    "num_heads": "--set train.head.attention_heads={}",
    "sliding_window": "--set train.head.sliding_window={}",
    "rope_theta": "--set train.head.rope_theta={}",
    "norm_before_residual": "--set train.head.norm_before_residual={}",
    "norm_before_fc": "--set train.head.norm_before_fc={}",
    "fc_norm": "--set train.head.fc_norm={}",
    "norm_output": "--set train.head.norm_output={}",
    "turned_rows": "--set train.head.turned_rows={}",
}


@dataclasses.dataclass(frozen=True, slots=True)
class StartingHead:
    """A finished head, in float32 on the CPU."""

    directory: Path
    head: Eagle3Head

    @property
    def fingerprint(self) -> str:
        """Of what training takes from it, whatever files it came in."""
        found = hashlib.sha256()
        for name, tensor in (*sorted(self.head.state_dict().items()), ("ids", self._ids_V)):
            found.update(f"{name} {list(tensor.shape)}\n".encode())
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    @property
    def _ids_V(self) -> Tensor:
        return self.head.draft_to_target_V.cpu()

    def give_to(self, new: Eagle3Head) -> None:
        """Copy all weights."""
        place = torch.full((new.config.vocab_size,), -1)
        place[self._ids_V] = torch.arange(len(self._ids_V))
        old_V = place[new.draft_to_target_V.cpu()]
        is_shared_V = old_V >= 0
        weights = {
            name: _widened(name, old, new.get_parameter(name).detach())
            for name, old in self.head.named_parameters()
        }
        if not new.config.turned_rows:
            rows_VD = new.lm_head.weight.detach().clone()
            rows_VD[is_shared_V] = self.head.lm_head.weight[old_V[is_shared_V]]
            weights["lm_head.weight"] = rows_VD
        new.load_state_dict(weights)


def _widened(name: str, old: Tensor, new: Tensor) -> Tensor:
    """The old weight, in as many rows or columns as the new one has.

    Query heads lie beside those that share their key-value head, so new groups come last.
    """
    if name.endswith(_READERS):
        return torch.cat([old, new[len(old) :]])
    if name.endswith(_WRITERS):
        return torch.cat([old, torch.zeros_like(new[:, old.shape[1] :])], dim=1)
    return old


def open_starting_head(directory: Path, wanted: HeadConfig, *, num_layers: int) -> StartingHead:
    """A head that may become one of this shape; `num_layers` are the target's."""
    head = load_head(directory.expanduser()).float()
    _refuse_other_shape(directory, head.config, wanted)
    taps, asked = (config.resolve_taps(num_layers) for config in (head.config, wanted))
    if taps != asked:
        raise MismatchError(
            f"{directory} reads the completed layers {list(taps)}, and the head to be trained "
            f"{list(asked)}; give --set capture.layers={list(taps)}, or begin with a new head."
        )
    if head.own_embedding is not None:
        raise MismatchError(
            f"{directory} has an embedding of its own, and training reads the target's; begin "
            "with a new head."
        )
    return StartingHead(directory, head)


def _may_grow(found: HeadConfig, wanted: HeadConfig) -> tuple[str, ...]:
    """What may be larger; attention heads by whole groups that share a key-value head."""
    has_same_groups = found.num_heads * wanted.num_kv_heads == wanted.num_heads * found.num_kv_heads
    return ("intermediate_size", *(("num_heads", "num_kv_heads") if has_same_groups else ()))


def _refuse_other_shape(directory: Path, found: HeadConfig, wanted: HeadConfig) -> None:
    may_grow = _may_grow(found, wanted)
    for field in dataclasses.fields(HeadConfig):
        theirs, ours = getattr(found, field.name), getattr(wanted, field.name)
        is_wider = field.name in may_grow and theirs < ours
        if theirs == ours or is_wider or field.name in _MAY_DIFFER:
            continue
        remedy = "begin with a new head"
        if field.name in _REMEDIES:
            value = json.dumps(0 if theirs is None else theirs)
            remedy = f"give {_REMEDIES[field.name].format(value)}, or {remedy}"
        raise MismatchError(
            f"{directory} has {field.name} {theirs}, and the head to be trained {ours}; {remedy}."
        )
