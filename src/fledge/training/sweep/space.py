"""The space of a sweep: which values a trial may have, and what they do to the settings."""

import dataclasses
import itertools
import random
import typing
from collections.abc import Mapping
from typing import Any

from fledge.contracts.errors import ConfigError
from fledge.contracts.sweep_settings import KnobRange, SweepSettings
from fledge.contracts.toml_settings import read_settings, read_value, to_plain
from fledge.contracts.train_settings import TrainSettings

Values = Mapping[str, Any]
"""One value for each setting that is varied, by its name below the recipe."""

_ROOT = "train"


def apply_values(settings: TrainSettings, values: Values) -> TrainSettings:
    """The settings of one trial, checked like those of a recipe."""
    table = to_plain(settings)
    for name, value in values.items():
        field_type(name)
        *folders, last = name.split(".")[1:]
        place = table
        for folder in folders:
            place = place[folder]
        place[last] = value
    return read_settings(TrainSettings, table, where=_ROOT)


def check_space(settings: SweepSettings, train: TrainSettings) -> None:
    """Refuse names that are no settings, values of a wrong type, and a grid with a bad corner."""
    for name, knob in settings.knobs.items():
        kind = field_type(name)
        if isinstance(knob, KnobRange):
            _check_bounds(name, knob, kind)
        else:
            for value in knob:
                read_value(kind, value, where=f"sweep.space.{name}")
    if settings.method == "grid":
        for values in list_grid(settings):
            try:
                apply_values(train, values)
            except ConfigError as error:
                raise ConfigError(f"the sweep's trial with {describe(values)}: {error}") from error


def _check_bounds(name: str, knob: KnobRange, kind: Any) -> None:
    if kind not in (int, float):
        raise ConfigError(
            f"sweep.space has bounds for {name}, which is not a number; list its values."
        )
    for bound in (knob.low, knob.high, knob.step):
        if kind is int and bound != int(bound):
            raise ConfigError(
                f"sweep.space has {bound} as a bound or step of {name}, which is a whole number."
            )


def list_grid(settings: SweepSettings) -> list[dict[str, Any]]:
    """The combinations of a grid, the last setting changing fastest; some of them, if so asked."""
    knobs = settings.knobs
    rows = itertools.product(*(knob for knob in knobs.values() if isinstance(knob, tuple)))
    every = [dict(zip(knobs, row, strict=True)) for row in rows]
    if not settings.trials or settings.trials >= len(every):
        return every
    chosen = random.Random(settings.seed).sample(range(len(every)), settings.trials)
    return [every[place] for place in sorted(chosen)]


def field_type(name: str) -> Any:
    """The type that a setting has in `TrainSettings`."""
    kind: Any = TrainSettings
    for part in name.split(".")[1:]:
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if part not in hints:
            raise _unknown(name)
        kind = hints[part]
    return kind


def describe(values: Values) -> str:
    """`learning_rate=0.0004, steps=5`: names without what they all share."""
    return ", ".join(f"{short_name(name)}={_shown(value)}" for name, value in values.items())


def short_name(name: str) -> str:
    return name.rsplit(".", maxsplit=1)[-1]


def _unknown(name: str) -> ConfigError:
    known = ", ".join(_leaves(TrainSettings, _ROOT))
    return ConfigError(f"sweep.space varies {name}, and there is no such setting; known: {known}.")


def _leaves(kind: Any, prefix: str) -> list[str]:
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        whole = f"{prefix}.{name}"
        found += _leaves(hint, whole) if dataclasses.is_dataclass(hint) else [whole]
    return found


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
