"""Prompts that the target writes itself: no third party's licence, no personal data."""

from collections.abc import Iterator
from pathlib import Path

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import SelfSettings, SourceSettings
from fledge.contracts.progress import Progress
from fledge.engine.engine import Engine


class SelfPromptWriter:
    """Asks a target for user prompts by sampling where its chat template puts them.

    With a `journal`, every batch of tries is written down; a run that was interrupted reads it
    instead of asking again, and yields the same rows from the first on.
    """

    def __init__(
        self, engine: Engine, *, progress: Progress | None = None, journal: Path | None = None
    ) -> None:
        raise NotImplementedError

    def __call__(
        self, source: SourceSettings, settings: SelfSettings, seed: int
    ) -> Iterator[Conversation]:
        """`settings.rows` usable prompts that all differ, or fewer when tries run out."""
        raise NotImplementedError
