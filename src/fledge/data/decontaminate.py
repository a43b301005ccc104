"""Which rows overlap with prompts that are kept for measuring."""

from typing import Literal, NamedTuple

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import DecontaminateSettings
from fledge.contracts.progress import Progress

Rule = Literal["equal", "contained", "shared"]


class Overlap(NamedTuple):
    """What a row has in common with a benchmark."""

    benchmark: str
    """Name of the benchmark's file."""

    rule: Rule
    text: str
    """The words in common, normalised."""


class Decontaminator:
    """The prompts of all benchmark files, ready to be looked for."""

    def __init__(self, settings: DecontaminateSettings, progress: Progress) -> None:
        raise NotImplementedError

    def overlap(self, conversation: Conversation) -> str | None:
        """The name of the benchmark file that a row overlaps with."""
        raise NotImplementedError

    def find(self, conversation: Conversation) -> Overlap | None:
        """The same, with the rule and the words."""
        raise NotImplementedError

    @property
    def counts(self) -> dict[str, dict[Rule, int]]:
        """Rows found by this object, by benchmark and rule."""
        raise NotImplementedError
