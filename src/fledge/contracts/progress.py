"""How long work reports where it is, without knowing who shows it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One piece of work with a known or unknown size."""

    def advance(self, amount: int) -> None:
        """More work is done, in the unit of the task's total."""

    def update_total(self, total: int) -> None:
        """The size became known."""

    def update_label(self, label: str) -> None:
        """What is shown beside the bar changed: the newest figure, say."""


class Progress(Protocol):
    """Shows tasks and notes; the command line draws bars, libraries stay silent."""

    def task(
        self, label: str, total: int | None = None, unit: str = "bytes"
    ) -> AbstractContextManager[Task]:
        """A context around one task."""

    def note(self, text: str) -> None:
        """One line of prose for the user."""


class _SilentTask:
    def advance(self, amount: int) -> None:
        del amount

    def update_total(self, total: int) -> None:
        del total

    def update_label(self, label: str) -> None:
        del label


class SilentProgress:
    """Shows nothing: the default wherever a `Progress` is asked for."""

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        del label, total, unit
        yield _SilentTask()

    def note(self, text: str) -> None:
        del text
