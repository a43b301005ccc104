"""The space of a sweep: lists, bounds, dotted names, and what is refused."""

import re
from typing import Any

import pytest

from fledge.contracts.errors import ConfigError
from fledge.contracts.recipe import read_recipe
from fledge.contracts.sweep_settings import KnobRange, SweepSettings
from fledge.contracts.toml_settings import to_plain

RATE = "train.optimizer.learning_rate"


def read(**sweep: Any) -> SweepSettings:
    settings = read_recipe({"sweep": sweep}).sweep
    assert settings is not None
    return settings


def test_a_recipe_needs_no_sweep() -> None:
    assert read_recipe({}).sweep is None


def test_names_may_be_quoted_or_nested() -> None:
    quoted = read(space={RATE: [1e-4, 4e-4], "train.epochs": [1, 2]})
    nested = read(space={"train": {"optimizer": {"learning_rate": [1e-4, 4e-4]}, "epochs": [1, 2]}})
    assert quoted.knobs == nested.knobs == {RATE: (1e-4, 4e-4), "train.epochs": (1, 2)}


def test_bounds_are_for_tpe() -> None:
    settings = read(method="tpe", space={RATE: {"low": 1e-5, "high": 1e-3, "log": True}})
    assert settings.knobs == {RATE: KnobRange(low=1e-5, high=1e-3, log=True)}
    plain = to_plain(settings)
    assert plain["space"] == {RATE: {"low": 1e-5, "high": 1e-3, "log": True}}


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({}, "space names no settings to vary"),
        ({"space": {"train.epochs": []}}, "empty list for train.epochs"),
        ({"space": {"train.epochs": 3}}, "space has 3 for train.epochs; it must be a list"),
        ({"space": {"capture.layers": [[1], [2]]}}, "only settings under train can be varied"),
        (
            {"space": {RATE: {"low": 1.0, "high": 2.0}}},
            f"bounds for {RATE}, and a grid needs a list",
        ),
        (
            {"method": "tpe", "space": {RATE: {"low": 2.0, "high": 1.0}}},
            "low is 2.0 and high 1.0; low must be lower",
        ),
        (
            {"method": "tpe", "space": {RATE: {"low": 0.0, "high": 1.0, "log": True}}},
            "with log = true it must be above 0",
        ),
        (
            {"method": "tpe", "space": {RATE: {"low": 0.1, "high": 1, "log": True, "step": 0.1}}},
            "step is 0.1 and log is true",
        ),
        (
            {"method": "tpe", "space": {RATE: {"low": 0.1, "hihg": 1}}},
            f"space.{RATE} has no setting `hihg`; did you mean `high`?",
        ),
        ({"method": "random", "space": {RATE: [1.0]}}, "it must be one of 'grid', 'tpe'"),
        ({"trials": -1, "space": {RATE: [1.0]}}, "trials is -1"),
        ({"grace": 0, "space": {RATE: [1.0]}}, "grace is 0"),
    ],
)
def test_what_is_refused(sweep: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(**sweep)
