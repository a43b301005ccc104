"""What an assistant's message says, compared with how a template writes it.

Templates may trim what was said; they must not change it. Those of reasoning targets drop the
reasoning from every render, the newest included; then the answer is put together as such targets
write it: reasoning, closing tag, answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fledge.contracts.conversation import Message

THINK = "<think>"
"""The tag that reasoning targets write themselves when the prompt does not open one."""


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A rendered answer that holds all of a message."""

    text: str
    last_stop: int
    """Where the last of what was said ends; the template wrote the rest."""

    has_calls: bool

    @property
    def as_cut(self) -> str:
        """The answer of a target that was stopped: without what the template closes it with."""
        return self.text if self.has_calls else self.text[: self.last_stop]


def find_said(message: Message, text: str) -> SaidTurn | None:
    """The places of reasoning and content in a rendered answer; None when something is missing."""
    reasoning, content = (
        str(message.get(key) or "").strip() for key in ("reasoning_content", "content")
    )
    first = text.find(reasoning)
    # The last place: a short answer may also be a part of what the template writes before it.
    last = text.rfind(content) if content else first + len(reasoning)
    if first < 0 or last < first + len(reasoning):
        return None
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    if any(name not in text for name in names):
        return None
    return SaidTurn(text, last + len(content), bool(names))


def spoken_text(
    message: Message, prompt: str, tags: Mapping[str, str], *, is_whole: bool
) -> str | None:
    """What a reasoning target said to this prompt, its end-of-turn token aside; None if unknown.

    `tags` are the target's opening tags with the closing ones. The prompt may have opened one.
    """
    if message.get("tool_calls"):
        return None
    opened = next((tag for tag in tags if prompt.rstrip().endswith(tag)), None)
    tag = opened or THINK
    if tag not in tags:
        return None
    closing = tags[tag]
    reasoning = str(message.get("reasoning_content") or "").strip("\n")
    content = str(message.get("content") or "")
    if reasoning:
        begun = reasoning if opened else f"{tag}\n{reasoning}"
        if not is_whole and not content:
            return begun
        return f"{begun}\n{closing}\n\n{content.lstrip(chr(10))}"
    if closing not in content and is_whole:
        return None
    # The server left the reasoning in the content, perhaps with the tag that the prompt opened.
    if opened:
        return content.strip().removeprefix(opened).lstrip("\n")
    return content if content.lstrip().startswith(tag) else None
