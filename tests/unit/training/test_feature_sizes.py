"""Sizes of features: powers of two, and not misled by single tokens."""

import torch

from fledge.training.feature_sizes import power_of_two_sizes


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
