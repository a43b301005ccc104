"""Progress of long work on stderr: bars on a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fledge.cli.render import duration, say
from fledge.contracts.progress import Progress, Task
from fledge.store.capacity import format_bytes

_LINE_EVERY_S = 10.0
_LEAST_SHARE = 0.05
_LONG_S = 600.0
"""Rows that are worked on together end together: the first one would promise hours."""


def terminal_progress() -> Progress:
    """What suits stderr as it is now."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


class LineProgress:
    """Plain lines for logs and pipes: one when a task starts, one at its end, few in between."""

    def __init__(self, line_every_s: float = _LINE_EVERY_S) -> None:
        self._line_every_s = line_every_s

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        task = _LineTask(label, total, unit, self._line_every_s)
        try:
            yield task
            task.finish()
        finally:
            task.end()

    def note(self, text: str) -> None:
        say(text)


class _LineTask:
    """Says a line now and then, also while nothing comes to an end."""

    def __init__(self, label: str, total: int | None, unit: str, line_every_s: float) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._line_every_s = line_every_s
        self._done = 0
        self._started = self._last_line = time.monotonic()
        say(f"{label} ({_amount(total, unit)})" if total else label)
        self._ended = threading.Event()
        if line_every_s:
            threading.Thread(target=self._beat, name="fledge-progress", daemon=True).start()

    def advance(self, amount: int) -> None:
        self._done += amount
        self._say_if_due()

    def _say_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last_line >= self._line_every_s:
            self._last_line = now
            say(f"{self._label}: {self._state(now - self._started)}")

    def _beat(self) -> None:
        while not self._ended.wait(self._line_every_s):
            self._say_if_due()  # adding is left to one thread: two would lose what they add

    def end(self) -> None:
        """No more lines."""
        self._ended.set()

    def update_total(self, total: int) -> None:
        self._total = total

    def update_label(self, label: str) -> None:
        self._label = label

    def finish(self) -> None:
        say(f"{self._label}: done in {duration(time.monotonic() - self._started)}")

    def _state(self, elapsed_s: float) -> str:
        if not self._done:
            size = f"0 of {_amount(self._total, self._unit)}, " if self._total else ""
            return f"{size}{duration(elapsed_s)} so far"
        rate = self._done / elapsed_s if elapsed_s > 0 else 0.0
        speed = _speed(rate, self._unit)
        if not self._total:
            return f"{_amount(self._done, self._unit)}, {speed}"
        share = min(self._done / self._total, 1.0)
        text = f"{share:.0%} of {_amount(self._total, self._unit)}, {speed}"
        if share < _LEAST_SHARE and elapsed_s < _LONG_S:
            return text
        left = (self._total - self._done) / rate if rate else 0.0
        return f"{text}, {duration(left)} left"


def _amount(number: int, unit: str) -> str:
    return format_bytes(number) if unit == "bytes" else f"{number:,} {unit}"


def _speed(rate: float, unit: str) -> str:
    """A rate per second; a target may need seconds for each row."""
    if unit != "bytes" and 0 < rate < 10:
        return f"{rate:.2g} {unit}/s"
    return f"{_amount(round(rate), unit)}/s"


class BarProgress:
    """Bars with rate and time left; those of work that is done stay visible above the rest."""

    def __init__(self) -> None:
        self._display: Any = None
        self._num_open = 0

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        if self._display is None:
            self._display = _make_display()
        task_id = self._display.add_task(label, total=total, unit=unit)
        self._num_open += 1
        self._display.start()
        task = _BarTask(self._display, task_id)
        try:
            yield task
            task.finish()
        except BaseException:
            # The error says more than half a bar would.
            task.hide()
            raise
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._display.stop()
                self._display = None

    def note(self, text: str) -> None:
        if self._display is None:
            say(text)
        else:
            self._display.console.print(text, style="dim", markup=False, highlight=False)


class _BarTask:
    def __init__(self, display: Any, task_id: Any) -> None:
        self._display, self._task_id = display, task_id

    def advance(self, amount: int) -> None:
        self._display.advance(self._task_id, amount)

    def update_total(self, total: int) -> None:
        self._display.update(self._task_id, total=total)

    def update_label(self, label: str) -> None:
        self._display.update(self._task_id, description=label)

    def finish(self) -> None:
        """Work of unknown size is whole when it ends."""
        if self._display.tasks[self._task_id].total is None:
            self._display.update(self._task_id, total=1, completed=1, unit=None)

    def hide(self) -> None:
        self._display.update(self._task_id, visible=False)


def _make_display() -> Any:
    """A rich display on stderr; made on first use, since importing rich takes a moment."""
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Amount(progress.ProgressColumn):
        """Done, total and rate in the task's own unit."""

        def render(self, task: progress.Task) -> Text:
            unit = task.fields["unit"]
            if task.total is None or unit is None:
                return Text("")
            text = f"{_amount(int(task.completed), unit)} of {_amount(int(task.total), unit)}"
            speed = task.finished_speed or task.speed
            if speed:
                text += f", {_speed(speed, unit)}"
            return Text(text)

    return progress.Progress(
        progress.SpinnerColumn(finished_text="✓"),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=24),
        Amount(),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
