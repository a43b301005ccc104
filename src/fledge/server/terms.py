"""On which terms a request is served: people who wait come first, lines of a batch give way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TERMS = "fledge_terms"
"""Where the state of a request has its terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an answer may count on."""

    priority: int = 0
    """The engine serves higher ones first, and takes rows and memory from lower ones."""

    has_deadline: bool = True
    """It must be finished within the server's request_timeout_s."""

    @property
    def is_patient(self) -> bool:
        """It waits without taking room from those who are admitted by the length of the queue."""
        return self.priority < 0


INTERACTIVE = Terms()
BATCH = Terms(priority=-1, has_deadline=False)


def terms_of(state: Mapping[str, Any]) -> Terms:
    found: Terms = state.get(TERMS, INTERACTIVE)
    return found
