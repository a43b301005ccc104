"""Scrubs conversations: every text a target would read, as the recipe says for each type."""

from collections import Counter
from dataclasses import dataclass

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrivacySettings
from fledge.data.privacy.conversation_texts import rewrite_conversation
from fledge.data.privacy.detection import find
from fledge.data.privacy.finding import Finding
from fledge.data.privacy.placeholders import Placeholders, redact


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What is left of a conversation, and what was in it."""

    conversation: Conversation | None
    """None when it holds a type whose action is `drop`."""

    found: Counter[str]
    """Findings of each type, those that are kept included."""


class Scrubber:
    """Applies privacy settings to conversations."""

    def __init__(self, settings: PrivacySettings) -> None:
        self.settings = settings

    def scrub(self, conversation: Conversation) -> Scrubbed:
        """The conversation with placeholders, or None for a row to drop."""
        found: Counter[str] = Counter()
        if not self.settings.enabled:
            return Scrubbed(conversation, found)
        placeholders = Placeholders()

        def reserve(text: str, field: str) -> str:
            placeholders.reserve(text)
            return text

        def rewrite(text: str, field: str) -> str:
            findings = _find_in_field(text, field)
            found.update(finding.type for finding in findings)
            replaced = [f for f in findings if self.settings.action(f.type) == "replace"]
            return redact(text, replaced, placeholders)

        rewrite_conversation(conversation, reserve)
        result = rewrite_conversation(conversation, rewrite)
        if any(self.settings.action(kind) == "drop" for kind in found):
            return Scrubbed(None, found)
        return Scrubbed(result, found)


def _find_in_field(text: str, field: str) -> list[Finding]:
    """Findings in a value; the name of its field counts as words before it."""
    if not field:
        return find(text)
    lead = f"{field}: "
    return [
        Finding(f.type, f.start - len(lead), f.end - len(lead), f.score)
        for f in find(lead + text)
        if f.start >= len(lead)
    ]
