"""Which values the next trial gets: the next of a grid, or what Optuna proposes.

A proposal is a function of the seed, its number and the trials before it. The trials on disk are
all there is to remember: a sweep that was killed goes on as it would have gone on.
"""

from collections.abc import Sequence
from typing import Any

from fledge.contracts.errors import ConfigError
from fledge.contracts.sweep_settings import DEFAULT_TRIALS, Knob, KnobRange, SweepSettings
from fledge.training.sweep.space import Values, field_type, list_grid
from fledge.training.sweep.trials import Trial

_MAX_REPEATS = 50
"""Proposals in a row that were tried before: the space is used up."""


def count_trials(settings: SweepSettings) -> int:
    """Trials that a sweep makes at most."""
    if settings.method == "grid":
        return len(list_grid(settings))
    return settings.trials or DEFAULT_TRIALS


def propose(settings: SweepSettings, earlier: Sequence[Trial], number: int) -> Values | None:
    """Values of a trial by its number, counted from 1; None when nothing is left to try."""
    if number > count_trials(settings):
        return None
    if settings.method == "grid":
        return list_grid(settings)[number - 1]
    return _propose_by_tpe(settings, earlier, number)


def require_optuna() -> Any:
    """The package, or which extra brings it."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            'sweep.method is "tpe", which needs the package optuna; `pip install '
            "'fledge[sweep]'`, or set method = \"grid\"."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _propose_by_tpe(
    settings: SweepSettings, earlier: Sequence[Trial], number: int
) -> Values | None:
    optuna = require_optuna()
    knobs = settings.knobs
    distributions = {name: _distribution(optuna, name, knob) for name, knob in knobs.items()}
    startup = max(2, min(10, count_trials(settings) // 3))
    for repeat in range(_MAX_REPEATS):
        seed = (settings.seed * 1_000_003 + number) * _MAX_REPEATS + repeat
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=startup)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in earlier:
            study.add_trial(_past(optuna, trial, knobs, distributions))
        proposed = study.ask(distributions).params
        values = {name: _from_optuna(proposed[name], knob) for name, knob in knobs.items()}
        if all(values != trial.values for trial in earlier):
            return values
    return None


def _past(optuna: Any, trial: Trial, knobs: dict[str, Knob], distributions: Any) -> Any:
    """A trial as Optuna knows it; one that was given up counts with what it had reached."""
    score = trial.result.score if trial.result is not None else None
    is_known = score is not None and trial.result is not None and trial.result.state != "failed"
    return optuna.trial.create_trial(
        params={name: _to_optuna(trial.values[name], knob) for name, knob in knobs.items()},
        distributions=distributions,
        value=score if is_known else None,
        state=optuna.trial.TrialState.COMPLETE if is_known else optuna.trial.TrialState.FAIL,
    )


def _distribution(optuna: Any, name: str, knob: Knob) -> Any:
    if isinstance(knob, tuple):
        # By their numbers: values may be lists, which Optuna does not take.
        return optuna.distributions.CategoricalDistribution(range(len(knob)))
    step = knob.step or None
    if field_type(name) is int:
        return optuna.distributions.IntDistribution(
            int(knob.low), int(knob.high), log=knob.log, step=int(step or 1)
        )
    return optuna.distributions.FloatDistribution(knob.low, knob.high, log=knob.log, step=step)


def _from_optuna(value: Any, knob: Knob) -> Any:
    return value if isinstance(knob, KnobRange) else knob[value]


def _to_optuna(value: Any, knob: Knob) -> Any:
    return value if isinstance(knob, KnobRange) else knob.index(value)
