"""How many steps Muon's weight decay leaves something of.

Every step takes rate times decay off what all steps before it have taught. Rate and decay that are
best for some hundred steps make a long run forget nearly all of what it went through.
"""

from fledge.contracts.train_settings import OptimizerSettings
from fledge.training.optimizer import learning_rate

_LEAST_SHARE = 0.25
"""Of a run, below which its settings waste most of it."""


def steps_remembered(settings: OptimizerSettings, num_steps: int) -> int:
    """The last steps of a run whose part in the matrices is more than 1/e at its end."""
    if settings.kind != "muon" or settings.muon_decay == 0:
        return num_steps
    per_rate = settings.muon_rate / settings.learning_rate * settings.muon_decay
    taken = 0.0
    for back in range(num_steps):
        taken += per_rate * learning_rate(settings, num_steps - 1 - back, num_steps)
        if taken >= 1:
            return back
    return num_steps


def short_memory(settings: OptimizerSettings, num_steps: int) -> str | None:
    """What to say of a run that forgets most of what it learns."""
    remembered = steps_remembered(settings, num_steps)
    if remembered >= _LEAST_SHARE * num_steps:
        return None
    at_once = 100 * settings.muon_rate * settings.muon_decay
    return (
        f"muon_rate {settings.muon_rate:g} times muon_decay {settings.muon_decay:g} takes "
        f"{at_once:.3g}% off the matrices in a step: of {num_steps:,} steps mostly the last "
        f"{remembered:,} will be left. Lower train.optimizer.muon_rate to remember more."
    )
