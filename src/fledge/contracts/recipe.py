"""The recipe: one TOML file that describes a whole run, read strictly."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.data_settings import PrepareSettings
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.run_settings import RunSettings
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.server_settings import ServeSettings
from fledge.contracts.sweep_settings import SweepSettings
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.contracts.toml_settings import override, read_settings, read_toml
from fledge.contracts.train_settings import TrainSettings
from fledge.contracts.tune_settings import TuneSettings

DEFAULT_TARGET = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of every stage."""

    prepare: PrepareSettings | None = None
    target: str = DEFAULT_TARGET
    regenerate: RegenerateSettings = field(default_factory=RegenerateSettings)
    tokenize: TokenizeSettings = field(default_factory=TokenizeSettings)
    capture: CaptureSettings = field(default_factory=CaptureSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    tune: TuneSettings = field(default_factory=TuneSettings)
    bench: BenchSettings = field(default_factory=BenchSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    sweep: SweepSettings | None = None
    run: RunSettings = field(default_factory=RunSettings)


def load_recipe(path: Path | None, assignments: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `--set` assignments; without a file all settings are defaults.

    Files of prompts that lie where the recipe says, seen from its own directory, are found there.
    """
    if path is None:
        return read_recipe({}, assignments)
    recipe = read_recipe(read_toml(path), assignments)
    return replace(
        recipe,
        select=replace(recipe.select, suites=_found(path.parent, recipe.select.suites)),
        tune=replace(recipe.tune, suites=_found(path.parent, recipe.tune.suites)),
        bench=replace(recipe.bench, prompts=_found(path.parent, [recipe.bench.prompts])[0]),
    )


def _found(base: Path, suites: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(base / name) if (base / name).exists() else name for name in suites)


def read_recipe(table: dict[str, Any], assignments: Sequence[str] = ()) -> Recipe:
    """The recipe that a TOML table describes."""
    return read_settings(Recipe, override(table, assignments), where="")
