"""Personal and financial identifiers, found and replaced by stable placeholders.

    Scrubber(settings).scrub(conversation) -> Scrubbed     every text of a conversation
    find(text) -> list[Finding]                            one text, without names and places
    redact(text, findings) -> str

Identifiers with a checksum are found by pattern and checksum, others by shape and the words beside
them, secrets by the shapes their issuers gave them. Names and places come from a plug-in that tags;
`names` holds the policy that decides.
"""

from fledge.data.privacy.detection import find
from fledge.data.privacy.finding import Finding
from fledge.data.privacy.placeholders import Placeholders, redact
from fledge.data.privacy.scrubber import Scrubbed, Scrubber

__all__ = ["Finding", "Placeholders", "Scrubbed", "Scrubber", "find", "redact"]
