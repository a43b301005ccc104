"""What a sweep would take, before anything runs; early stopping only makes it less."""

from typing import Any

from fledge.contracts.sweep_settings import SweepSettings
from fledge.contracts.train_settings import TrainSettings
from fledge.features.device_speed import measure_flops
from fledge.models.placement import pick_dtype
from fledge.training.sweep.proposals import count_trials
from fledge.training.sweep.space import Values, list_grid
from fledge.training.sweep.stage import trial_settings
from fledge.training.train_input import TrainInput
from fledge.training.train_plan import plan_training


def plan_sweep(given: TrainInput, settings: SweepSettings, base: TrainSettings) -> dict[str, Any]:
    """Sums over all trials; those that are not known yet count like the recipe's own settings."""
    number = count_trials(settings)
    values: list[Values] = [{}] * number if settings.method == "tpe" else [*list_grid(settings)]
    dtype = pick_dtype(base.dtype, given.device)
    speed = measure_flops(given.device, dtype)
    plans = [
        plan_training(given, trial_settings(base, one), itemsize=dtype.itemsize, flops_per_s=speed)
        for one in values
    ]
    return {
        "trials": number,
        "steps": sum(plan.steps for plan in plans),
        "tokens": sum(plan.tokens for plan in plans),
        "stored_bytes": sum(plan.stored_bytes for plan in plans),
        "device_bytes": max(plan.device_bytes for plan in plans),
        "seconds": sum(plan.seconds or 0.0 for plan in plans),
    }
