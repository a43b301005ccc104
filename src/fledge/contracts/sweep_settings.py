"""Settings of a sweep: which settings of training are varied, how, and when a trial is given up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fledge.contracts.data_settings import check_range
from fledge.contracts.errors import ConfigError
from fledge.contracts.toml_settings import read_settings

SweepMethod = Literal["grid", "tpe"]
EarlyStop = Literal["median", "halving", "none"]
DEFAULT_TRIALS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRange:
    """Numbers between two bounds, both included."""

    low: float
    high: float
    log: bool = False
    """Equal ratios are equally likely, not equal differences."""

    step: float = 0.0
    """Distance between the numbers that are tried; 0 tries any, or whole ones where the setting is
    a whole number."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"low is {self.low} and high {self.high}; low must be lower.")
        check_range("step", self.step, 0)
        if self.log and self.low <= 0:
            raise ConfigError(f"low is {self.low}; with log = true it must be above 0.")
        if self.log and self.step:
            raise ConfigError(f"step is {self.step} and log is true; only one of them works.")


Knob = KnobRange | tuple[Any, ...]
"""Bounds, or the values themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """Many short runs of training that differ in some settings."""

    method: SweepMethod = "grid"
    """Every combination, or what Optuna's TPE proposes after what it has seen."""

    trials: int = 0
    """Runs in all; 0 means the whole grid, or 20 of `tpe`. Fewer than the grid are drawn of it."""

    stop: EarlyStop = "median"
    """Give up a trial whose accept length is below the median of the others at the same
    measurement, or (`halving`) not in their best third at measurement `grace` times 1, 3, 9 ..."""

    grace: int = 3
    """The first measurement at which a trial can be given up."""

    seed: int = 0
    space: dict[str, Any] = field(default_factory=dict)
    """By the setting's name below the recipe: a list of values, or low and high."""

    def __post_init__(self) -> None:
        check_range("trials", self.trials, 0)
        check_range("grace", self.grace, 1)
        knobs = self.knobs
        if not knobs:
            raise ConfigError(
                "space names no settings to vary; for instance "
                '"train.optimizer.learning_rate" = [1e-4, 4e-4].'
            )
        for name, knob in knobs.items():
            if not name.startswith("train."):
                raise ConfigError(
                    f"space varies {name}; a sweep trains from features that are there already, so "
                    "only settings under train can be varied."
                )
            if self.method == "grid" and isinstance(knob, KnobRange):
                raise ConfigError(
                    f"space has bounds for {name}, and a grid needs a list of values; list them, "
                    'or set method = "tpe".'
                )

    @property
    def knobs(self) -> dict[str, Knob]:
        """What is varied, by name; tables within tables count as dotted names."""
        return dict(_knobs(self.space, ""))


def _knobs(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Knob]]:
    found: list[tuple[str, Knob]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple):
            if not value:
                raise ConfigError(f"space has an empty list for {name}; name at least one value.")
            found.append((name, tuple(value)))
        elif isinstance(value, Mapping) and ("low" in value or "high" in value):
            found.append((name, read_settings(KnobRange, value, where=f"space.{name}")))
        elif isinstance(value, Mapping):
            found += _knobs(value, f"{name}.")
        else:
            raise ConfigError(
                f"space has {value!r} for {name}; it must be a list of values, or a table with low "
                "and high."
            )
    return found
