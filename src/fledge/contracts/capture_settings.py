"""Settings of capture: which layers are kept, how precisely, and in what portions."""

from dataclasses import dataclass
from typing import Literal

from fledge.contracts.data_settings import check_range
from fledge.contracts.errors import ConfigError

FeatureFormat = Literal["exact", "q8", "q6", "q5", "q4"]
"""As the target computes them, or rotated and rounded to so many bits a value."""

TargetFormat = Literal["auto", "hidden", "topk"]
LayerChoice = Literal["default", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """The target reads the corpus once and leaves behind what training needs."""

    layers: LayerChoice | tuple[int, ...] = "default"
    """Completed layers; `default` follows the field, `auto` compares candidates on a sample."""

    features: FeatureFormat = "q5"
    """How the tapped layers are stored."""

    target: TargetFormat = "hidden"
    """The target's distribution where the loss looks: final hidden rows, or its most probable
    tokens; `auto` takes what is smaller."""

    target_features: FeatureFormat = "q5"
    """How final hidden rows are stored."""

    top_k: int = 64
    """Tokens of the draft vocabulary kept per position with `topk`."""

    pass_tokens: int = 16384
    """Tokens that the target reads at once."""

    shard_tokens: int = 262_144
    """Tokens per file."""

    def __post_init__(self) -> None:
        for name in ("top_k", "pass_tokens", "shard_tokens"):
            check_range(name, getattr(self, name), 1)
        if isinstance(self.layers, tuple):
            if not self.layers:
                raise ConfigError("layers is an empty list; name at least one completed layer.")
            for layer in self.layers:
                check_range("a layer", layer, 0)
