"""Rotation in the words of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor

from fledge.contracts.errors import MismatchError
from fledge.ops.rope import default_frequencies

FACTORS = "rope_freqs.weight"
_KNOWN = ("default", "linear", "llama3")


def check_rope(scaling: Mapping[str, Any] | None, what: str) -> None:
    kind = (scaling or {}).get("rope_type", "default")
    if kind not in _KNOWN:
        raise MismatchError(
            f"{what} rotates by {kind!r}; written as GGUF here are {', '.join(_KNOWN)}. Make the "
            "file with llama.cpp's own converter."
        )


def add_rope(
    writer: GGUFWriter, *, theta: float, head_dim: int, scaling: Mapping[str, Any] | None
) -> None:
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    if scaling is not None and scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))


def rope_factors(
    scaling: Mapping[str, Any] | None, *, theta: float, head_dim: int
) -> Tensor | None:
    """What plain frequencies are divided by, for the one kind that llama.cpp has as a tensor."""
    if scaling is None or scaling["rope_type"] != "llama3":
        return None
    frequencies = default_frequencies(head_dim, theta)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # Fast frequencies stay, slow ones are slowed by the factor, those between by a part of it.
    share = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / (share + (1 - share) / scaling["factor"])
    return factors
