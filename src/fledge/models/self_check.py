"""Does a target say the same through our attention as through its own?

The losslessness tests answer that for the families they cover. A target of another family is asked
when it is loaded, with its real weights: two short prompts, packed, read in two passes so that the
second relies on the cache, against transformers reading each of them alone.
"""

import torch
from torch import Tensor

from fledge.contracts.errors import MismatchError
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.kv import KVPool
from fledge.ops.packed import SequencePart, pack

TESTED_MODEL_TYPES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"}
    | {"olmo2", "olmo3", "gpt_oss", "deepseek_v3"}
)
"""Families that tests/lossless covers."""

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_PROBE_LENS = (7, 5)
_FIRST_PASS = 3


def check_same_as_transformers(target: Target) -> None:
    """Refuse a target whose answers our attention would change."""
    model_type = target.config.model_type
    probes = _probes(target)
    ours = torch.cat(_read_in_two_passes(target, probes)).double()
    # With scores in float32, like ours: rounded to bfloat16 they can be half the logits off.
    theirs = torch.cat([target.logits_by_transformers(probe) for probe in probes]).double()
    error, limit = _relative_difference(ours, theirs), _ROUNDING[target.dtype]
    if not error <= limit:
        raise MismatchError(
            f"model type {model_type!r} computes other logits through fledge's attention than "
            f"through its own (relative difference {error:.2g}, at most {limit} is rounding); its "
            "answers would change, so fledge does not drive it."
        )


def check_reading(target: Target) -> None:
    """Refuse a target whose logits are not what its output matrix makes of its final states."""
    documents = make_documents(_PROBE_LENS, target.device)
    # Both sides come from the same layers and the same attention, so that only what lies between
    # states and logits can differ: layers and attention round, and have checks of their own.
    final_TD, logits_TV = target.states_and_logits(torch.cat(_probes(target)), documents)
    ours, theirs = target.readout.logits(final_TD).double(), logits_TV.double()
    error, limit = _relative_difference(ours, theirs), _ROUNDING[target.dtype]
    if not error <= limit:
        raise MismatchError(
            f"model type {target.config.model_type!r} makes other logits of its final hidden "
            f"states than its output matrix does (relative difference {error:.2g}, at most {limit} "
            "is rounding); fledge cannot tell what a head of it should learn."
        )


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _probes(target: Target) -> list[Tensor]:
    ids = torch.arange(3, 3 + sum(_PROBE_LENS), device=target.device) * 7 % target.vocab_size
    return [ids[: _PROBE_LENS[0]], ids[_PROBE_LENS[0] :]]


def _read_in_two_passes(target: Target, probes: list[Tensor]) -> list[Tensor]:
    """Logits of each probe, by our attention."""
    pool = KVPool(sum(_PROBE_LENS))
    first_slots = (0, _PROBE_LENS[0])
    passes = []
    for start, stop in ((0, _FIRST_PASS), (_FIRST_PASS, None)):
        parts = []
        for probe, first_slot in zip(probes, first_slots, strict=True):
            positions = torch.arange(len(probe), device=target.device)[:stop]
            slots = first_slot + positions
            parts.append(SequencePart(probe[start:stop], positions[start:], slots, positions))
        packed = pack(parts)
        logits_TV = target.forward(packed, pool).logits_RV
        passes.append([logits_TV[segment.rows] for segment in packed.segments])
    _check_layers(target, pool)
    _check_window(target, {window for segment in packed.segments for window in segment.masks})
    return [torch.cat(rows) for rows in zip(*passes, strict=True)]


def _check_layers(target: Target, pool: KVPool) -> None:
    bypassing = sorted(set(range(target.num_layers)) - pool.layer_ids)
    if bypassing:
        raise MismatchError(
            f"layers {bypassing} of model type {target.config.model_type!r} do not go through "
            "fledge's attention (recurrent layers, or attention of their own making); fledge keeps "
            "no state for them and does not drive this architecture."
        )


def _check_window(target: Target, asked: set[int | None]) -> None:
    """The probes are shorter than most windows, so a window that gets lost must be seen here."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window not in asked:
        raise MismatchError(
            f"model type {config.model_type!r} has a sliding window of {window} tokens that its "
            "attention does not ask for; beyond it the answers would change, so fledge does not "
            "drive it."
        )
