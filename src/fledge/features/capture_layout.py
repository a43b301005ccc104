"""From settings and sizes to what is stored of a sample, and the codecs that make it."""

from collections.abc import Sequence

import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.features.capture_plan import TargetSizes, choose_target_format
from fledge.ops.feature_codec import Codec, make_codec
from fledge.store.channels import Channels
from fledge.store.feature_layout import Counted, FeatureLayout, Part

TAPS, FINAL = "taps", "final"
"""What the names of coded parts begin with."""


def make_layout(
    settings: CaptureSettings, taps: Sequence[int], sizes: TargetSizes, dtype: torch.dtype
) -> FeatureLayout:
    """What is stored of each sample, with every `auto` decided."""
    hidden_size = sizes.hidden_size
    target = choose_target_format(settings, sizes)
    columns = make_codec(
        settings.features, hidden_size=hidden_size, num_taps=len(taps), dtype=dtype
    )
    coded = _parts(TAPS, columns, "features")
    if target == "hidden":
        final = make_codec(
            settings.target_features, hidden_size=hidden_size, num_taps=1, dtype=dtype
        )
        coded |= _parts(FINAL, final, "labels")
    return FeatureLayout(
        taps=tuple(taps),
        hidden_size=hidden_size,
        dtype=dtype_name(dtype),
        features=settings.features,
        target=target,
        target_features=settings.target_features if target == "hidden" else None,
        top_k=min(settings.top_k, sizes.draft_vocab_size) if target == "topk" else None,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=sizes.draft_vocab_size,
        coded=coded,
    )


def taps_codec(layout: FeatureLayout, channels: Channels | None) -> Codec:
    """The codec of the tapped layers; `channels` are None where they are stored exactly."""
    return make_codec(
        layout.features,
        hidden_size=layout.hidden_size,
        num_taps=len(layout.taps),
        dtype=getattr(torch, layout.dtype),
        channels=channels,
    )


def final_codec(layout: FeatureLayout) -> Codec | None:
    """The codec of final hidden rows; None where the most probable tokens are kept instead."""
    if layout.target_features is None:
        return None
    dtype = getattr(torch, layout.dtype)
    return make_codec(
        layout.target_features, hidden_size=layout.hidden_size, num_taps=1, dtype=dtype
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(prefix: str, codec: Codec, counted: Counted) -> dict[str, Part]:
    return {
        f"{prefix}.{name}": Part(dtype_name(dtype), columns, counted)
        for name, (dtype, columns) in codec.parts.items()
    }
