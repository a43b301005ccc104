"""From the options of a verb to a loaded engine, with something to look at meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.cli.progress import terminal_progress
from fledge.contracts.settings import EngineSettings
from fledge.contracts.tuned_settings import TunedSettings, obey

if TYPE_CHECKING:
    from fledge.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which engine the user asked for."""

    target: str
    head: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    settings: EngineSettings = field(default_factory=EngineSettings)
    tuned_by_kind: Mapping[str, TunedSettings] = field(default_factory=dict)
    """The tuning that comes with the head, by kind of device; it counts where nothing is asked."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and the names under which results speak of it."""

    engine: "Engine"
    choice: Choice

    @property
    def names(self) -> dict[str, str | None]:
        """Which target and head a result came from, as every JSON document states it."""
        directory, head = self.engine.target.directory, self.choice.head
        return {
            "target": self.choice.target,
            "target_dir": str(directory.absolute()) if directory is not None else None,
            "head": str(head) if head is not None else None,
        }


def load(choice: Choice) -> Loaded:
    """Fetch what is missing, load the target and the head."""
    progress = terminal_progress()
    with progress.task(f"loading {choice.target}", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.engine.engine import Engine
        from fledge.models.placement import pick_device

        tuned = choice.tuned_by_kind.get(pick_device(choice.device).type)
        engine = Engine.load(
            choice.target,
            choice.head,
            obey(tuned, choice.settings),
            device=choice.device,
            dtype=choice.dtype,
            progress=progress,
        )
    return Loaded(engine, choice)
