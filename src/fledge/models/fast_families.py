"""Families of targets that fledge has its own layers for, and in what they differ.

Known without torch, so that `fledge doctor` can say it where torch is missing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fledge.ops.norms import NormKind

NormPlace = Literal["before", "after", "around"]
"""Where a family norms: the input of attention and MLP, their output, or both."""


@dataclass(frozen=True, slots=True)
class Family:
    norm: "NormKind"
    place: NormPlace
    qk_norm: Literal["none", "head", "width"] = "none"
    """Queries and keys normed head by head, over their whole width, or not."""


FAMILIES = {
    "llama": Family("cast_first", "before"),
    "mistral": Family("cast_first", "before"),
    "qwen2": Family("cast_first", "before"),
    "qwen3": Family("cast_first", "before", "head"),
    "qwen3_moe": Family("cast_first", "before", "head"),
    "gemma2": Family("one_plus", "around"),
    "gemma3_text": Family("one_plus", "around", "head"),
    "olmo2": Family("cast_last", "after", "width"),
    "olmo3": Family("cast_last", "after", "width"),
}
"""By the model type of transformers. SmolLM2 is a Llama."""

NORM_NAMES: dict[NormPlace, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""transformers' names of the norms before and after attention, before and after the MLP."""
