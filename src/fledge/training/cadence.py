"""After which steps a run measures itself and saves itself; after the last one it does both."""

import math
from dataclasses import dataclass

from fledge.contracts.train_settings import TrainSettings

_MEASUREMENTS = 20
"""Of a run that does not say how many it wants."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Of a run with so many steps."""

    settings: TrainSettings
    num_steps: int

    @property
    def measure_every(self) -> int:
        wanted = self.settings.held_out.every
        return wanted or max(1, math.ceil(self.num_steps / _MEASUREMENTS))

    @property
    def save_every(self) -> int:
        return self.settings.checkpoint_every or self.measure_every

    @property
    def num_checkpoints(self) -> int:
        return math.ceil(self.num_steps / self.save_every)

    def is_measured(self, step: int) -> bool:
        """Of a step counted from 1."""
        return step == self.num_steps or step % self.measure_every == 0

    def is_saved(self, step: int) -> bool:
        return step == self.num_steps or step % self.save_every == 0
