"""Sizes of features: powers of two, and not misled by single tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.training.feature_sizes import measure_sizes, power_of_two_sizes


def test_sizes_are_the_powers_of_two_nearest_to_the_median() -> None:
    features = torch.tensor([[1.1, -30.0, 0.26], [-0.9, 33.0, -0.24], [1.0, 31.0, 0.25]])
    assert power_of_two_sizes(features).tolist() == [1.0, 32.0, 0.25]


def test_one_huge_token_and_silent_channels_do_not_count() -> None:
    features = torch.ones(9, 3)
    features[0] = 4096.0
    features[:, 2] = 0.0
    assert power_of_two_sizes(features).tolist() == [1.0, 1.0, 2.0**-10]
    assert power_of_two_sizes(torch.zeros(3, 2)).isfinite().all()


def test_tokens_that_are_no_numbers_do_not_count() -> None:
    features = torch.full((3, 2), 4.0)
    features[1, 0] = torch.nan
    assert power_of_two_sizes(features).tolist() == [4.0, 4.0]
    assert power_of_two_sizes(features[1:2]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("norm_before_fc", "factor"), [(False, 64.0), (True, 1.0)])
def test_a_head_with_a_norm_is_measured_behind_it(norm_before_fc: bool, factor: float) -> None:
    """Channels that outweigh the others are as uneven behind a norm over all of them."""
    config = HeadConfig(
        hidden_size=8,
        target_hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=16,
        draft_vocab_size=16,
        norm_before_fc=norm_before_fc,
    )
    head = Eagle3Head(config)
    features_TF = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    features_TF[:, 3] *= 256.0
    small, large = (
        measure_sizes(head, source_of(features_TF * scale), np.arange(1)) for scale in (1.0, 64.0)
    )
    assert torch.equal(large, small * factor)
    assert small[3] >= 64 * small.median()


def source_of(features_TF: torch.Tensor) -> Any:
    """One sample with these features, all of it taught."""
    loss_mask_T = torch.ones(len(features_TF), dtype=torch.bool)
    return SimpleNamespace(
        samples=SimpleNamespace(lengths=np.array([len(features_TF)])),
        load=lambda positions: positions,
        put=lambda _: SimpleNamespace(features_TF=features_TF, loss_mask_T=loss_mask_T),
    )
