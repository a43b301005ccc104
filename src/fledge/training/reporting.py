"""What a run tells of itself while it goes on: curves, the bar, a line at each measurement."""

import time
from pathlib import Path

from fledge.contracts.progress import Progress, Task
from fledge.contracts.train_settings import TrainSettings
from fledge.training.curves import CurveLog
from fledge.training.measuring import Measures
from fledge.training.metrics import measure_sums
from fledge.training.optimizer import learning_rate
from fledge.training.order import TrainingOrder
from fledge.training.plots import draw_curves
from fledge.training.readback import StepFigures
from fledge.training.sources import Waited

_DRAW_EVERY_S = 60.0


class Reporter:
    """Of the first process; it alone writes."""

    def __init__(
        self,
        curves: CurveLog,
        order: TrainingOrder,
        settings: TrainSettings,
        out: Path,
        progress: Progress,
        *,
        has_plots: bool = True,
    ) -> None:
        self._has_plots = has_plots
        self._curves, self._order, self._settings = curves, order, settings
        self._out, self._progress = out, progress
        self._task: Task | None = None
        self._coming: Waited | None = None
        self._last_s = self._last_waited_s = 0.0
        self._last_drawn_s = time.monotonic()
        self._accept_length: float | None = None
        self._timing: dict[str, float] = {}

    def begin(self, task: Task, coming: Waited) -> None:
        """Steps are about to be taken."""
        self._task, self._coming = task, coming
        self.resume()

    def resume(self) -> None:
        """What was done since the last step is not the steps' time."""
        self._last_s = time.perf_counter()
        self._last_waited_s = self._coming.waited_s if self._coming is not None else 0.0

    def add_step(self, figures: StepFigures, *, is_timed: bool = True) -> None:
        """Write a step down; one that is not timed has the times of the step before."""
        number = figures.step - 1
        tokens = self._order.tokens(number)
        if is_timed or not self._timing:
            self._time_step(tokens)
        depth = measure_sums(figures.sums, step_decay=self._settings.loss.step_decay)
        rate = learning_rate(self._settings.optimizer, number, self._order.num_steps)
        self._curves.add(
            figures.step,
            "train",
            {
                **depth.as_record(),
                "loss": figures.loss,
                "grad_norm": figures.norm,
                "learning_rate": rate,
                "tokens": tokens,
            },
            self._timing,
        )
        if self._task is not None:
            tail = (
                "" if self._accept_length is None else f", accept length {self._accept_length:.2f}"
            )
            self._task.update_label(f"training, loss {figures.loss:.3f}{tail}")

    def _time_step(self, tokens: int) -> None:
        """What has passed since the last step was written down."""
        elapsed = max(time.perf_counter() - self._last_s, 1e-9)
        waited = (self._coming.waited_s if self._coming is not None else 0.0) - self._last_waited_s
        self._timing = {
            "tokens_per_s": tokens / elapsed,
            "data_wait_share": min(waited / elapsed, 1.0),
        }
        self.resume()

    def add_measures(self, step: int, num_steps: int, measures: Measures) -> None:
        self._curves.add(step, "held_out", measures.depth.as_record())
        if measures.decode is not None:
            self._curves.add(step, "decode", measures.decode.as_record())
            self._accept_length = measures.accept_length
        self._progress.note(f"step {step:,} of {num_steps:,}, held out: {measures.line()}")

    def draw(self, *, is_last: bool = False) -> None:
        """Plots of all curves, not more often than somebody would look."""
        now = time.monotonic()
        is_due = is_last or now - self._last_drawn_s > _DRAW_EVERY_S
        if self._has_plots and is_due:
            self._last_drawn_s = now
            draw_curves(self._out)
