"""Directories of features with invented numbers, coded as capture codes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.capture_settings import CaptureSettings
from fledge.features.capture_layout import FINAL, TAPS, final_codec, make_layout, taps_codec
from fledge.features.capture_plan import TargetSizes
from fledge.features.feature_store import FeatureStore
from fledge.features.feature_writer import FeatureWriter
from fledge.store.channels import Channels
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from fledge.store.manifest import FEATURES, Plan
from fledge.store.vocab_map import VocabMap, choose_vocabulary

HIDDEN, VOCAB, DRAFT = 32, 512, 128
NUM_TAPS = 3


def invent_layout(
    features: str = "q8",
    target: str = "hidden",
    dtype: torch.dtype = torch.float32,
    *,
    hidden_size: int = HIDDEN,
) -> FeatureLayout:
    settings = CaptureSettings(features=features, target=target, target_features=features, top_k=4)
    sizes = TargetSizes(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT,
        itemsize=dtype.itemsize,
        num_parameters=1,
        num_active_parameters=1,
    )
    return make_layout(settings, (2, 5, 8), sizes, dtype)


def invent_channels(layout: FeatureLayout) -> Channels | None:
    """None where features are stored exactly."""
    if layout.features == "exact":
        return None
    numbers = np.linspace(0.5, 2, layout.row_width, dtype=np.float32)
    return Channels(numbers - 1, numbers)


def invent_sample(layout: FeatureLayout, number: int, num_tokens: int) -> EncodedSample:
    """The same for the same arguments."""
    chance = torch.Generator().manual_seed(number)
    mask = torch.rand(num_tokens, generator=chance) < 0.5
    mask[-1] = True
    num_labels = int(mask[2:].sum())
    size = layout.hidden_size

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(getattr(torch, layout.dtype))

    def ids(limit: int, *shape: int) -> NDArray[Any]:
        return torch.randint(0, limit, shape, generator=chance).numpy()

    taps = taps_codec(layout, invent_channels(layout))
    rows = _named(TAPS, taps.encode(numbers(num_tokens - 2, NUM_TAPS * size)))
    codec = final_codec(layout)
    if codec is not None:
        rows |= _named(FINAL, codec.encode(numbers(num_labels, size)))
    if layout.top_k is not None:
        rows["top.ids"] = ids(DRAFT, num_labels, layout.top_k)
        rows["top.logprobs"] = torch.rand(num_labels, layout.top_k, generator=chance).numpy()
    rows["greedy"] = ids(VOCAB, num_labels)
    rows["log_mass"] = torch.rand(num_labels, generator=chance).numpy()
    return EncodedSample(number, number // 2, ids(VOCAB, num_tokens), mask.numpy(), rows)


def _named(prefix: str, parts: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {
        f"{prefix}.{name}": (part.view(torch.uint16) if part.dtype is torch.bfloat16 else part)
        .contiguous()
        .numpy()
        for name, part in parts.items()
    }


def invent_samples(layout: FeatureLayout, count: int, *, longest: int = 40) -> list[EncodedSample]:
    lengths = np.random.default_rng(0).integers(3, longest + 1, count)
    return [invent_sample(layout, 3 * i, int(length)) for i, length in enumerate(lengths)]


def invent_plan(layout: FeatureLayout, **settings: Any) -> Plan:
    return Plan(
        kind=FEATURES,
        settings=settings,
        identity={"target": "tiny", "features": layout.to_json()},
    )


def vocabulary() -> VocabMap:
    return choose_vocabulary(np.ones(VOCAB, np.int64), DRAFT)


def write_features(
    address: str | Path,
    layout: FeatureLayout,
    samples: Sequence[EncodedSample],
    *,
    per_shard: int = 4,
) -> FeatureStore:
    with FeatureWriter.open(address, invent_plan(layout), vocabulary()) as writer:
        channels = invent_channels(layout)
        if channels is not None and not writer.finished:
            writer.channels = channels
        for number, start in enumerate(range(0, len(samples), per_shard)):
            if number not in writer.finished:
                writer.write_shard(number, samples[start : start + per_shard], {"shard": number})
        writer.finish(counts={"samples": len(samples)}, device="cpu")
    return FeatureStore.open(address)


def assert_same(found: EncodedSample, expected: EncodedSample) -> None:
    assert (found.number, found.row_hash) == (expected.number, expected.row_hash)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()
    assert found.loss_mask.dtype == np.bool_
    assert found.rows.keys() == expected.rows.keys()
    for name, array in expected.rows.items():
        wanted = array.astype(found.rows[name].dtype)
        assert np.array_equal(found.rows[name], wanted), name
