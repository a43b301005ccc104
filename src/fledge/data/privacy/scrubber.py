"""Scrubs conversations: every text a target would read, as the recipe says for each type."""

import re
from collections import Counter
from dataclasses import dataclass

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrivacySettings
from fledge.data.privacy.conversation_texts import rewrite_conversation
from fledge.data.privacy.detection import find
from fledge.data.privacy.finding import Finding, resolve
from fledge.data.privacy.names import KnownNames, NameFinder, NamePolicy
from fledge.data.privacy.placeholders import Placeholders, redact
from fledge.data.privacy.presidio_names import PresidioNames

_WITHIN_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What is left of a conversation, and what was in it."""

    conversation: Conversation | None
    """None when it holds a type whose action is `drop`."""

    found: Counter[str]
    """Findings of each type, those that are kept included."""


class Scrubber:
    """Applies privacy settings to conversations; `name_finder` replaces the default plug-in."""

    def __init__(self, settings: PrivacySettings, name_finder: NameFinder | None = None) -> None:
        self.settings = settings
        self._names: NamePolicy | None = None
        if settings.enabled and settings.names:
            finder = PresidioNames() if name_finder is None else name_finder
            self._names = NamePolicy(finder, settings.names_min_score)

    def scrub(self, conversation: Conversation) -> Scrubbed:
        """The conversation with placeholders, or None for a row to drop."""
        counts: Counter[str] = Counter()
        if not self.settings.enabled:
            return Scrubbed(conversation, counts)
        placeholders = Placeholders()
        known = KnownNames()
        findings_by_text: dict[tuple[str, str], list[Finding]] = {}

        def look(text: str, field: str) -> str:
            findings_by_text[text, field] = findings = self._find(text, field)
            placeholders.reserve(text)
            for finding in findings:
                if finding.type == "name":
                    known.add(text[finding.start : finding.end])
            return text

        def rewrite(text: str, field: str) -> str:
            findings = findings_by_text[text, field]
            if known.full_names:
                findings = resolve([*findings, *known.find(text)])
            counts.update(finding.type for finding in findings)
            replaced = [f for f in findings if self.settings.action(f.type) == "replace"]
            return redact(text, replaced, placeholders)

        rewrite_conversation(conversation, look)
        placeholders.link("name", known.full_names)
        result = rewrite_conversation(conversation, rewrite)
        if any(self.settings.action(kind) == "drop" for kind in counts):
            return Scrubbed(None, counts)
        return Scrubbed(result, counts)

    def _find(self, text: str, field: str) -> list[Finding]:
        """Findings in a value; the name of its field counts as words before it."""
        lead = f"{_WITHIN_CAMEL_CASE.sub(' ', field)}: " if field else ""
        findings = find(lead + text)
        if self._names is not None:
            findings = resolve([*findings, *self._names.find(lead + text, findings)])
        if not lead:
            return findings
        return [
            Finding(f.type, f.start - len(lead), f.end - len(lead), f.score)
            for f in findings
            if f.start >= len(lead)
        ]
