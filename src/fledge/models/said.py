"""What an assistant's message says, compared with how a template writes it.

Templates may trim what was said; they must not change it. Those of reasoning targets drop the
reasoning from every render, the newest included; then the answer is put together as such targets
write it: reasoning, closing tag, answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fledge.contracts.conversation import Message

THINK, END_THINK = "<think>", "</think>"
"""The tags that reasoning targets write, or that their prompts open for them."""


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A rendered answer that holds all of a message."""

    text: str
    start: int
    stop: int
    """Where what was said begins and ends; the template wrote the rest."""

    has_calls: bool

    @property
    def as_cut(self) -> str:
        """The answer of a target that was stopped: without what the template closes it with."""
        return self.text if self.has_calls else self.text[: self.stop]


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
    return SaidTurn(text, first if reasoning else last, last + len(content), bool(names))


@dataclass(frozen=True, slots=True)
class Asked:
    """What stands before an answer."""

    given: str
    """The messages that came before, without anything that asks for an answer."""

    prompt: str
    tags: Mapping[str, str]
    """The target's opening tags, with those that close what they open."""

    @property
    def open_tag(self) -> str | None:
        """The tag that the prompt opens for the target to go on in."""
        ending = self.prompt.rstrip()
        return next((tag for tag in (THINK, *self.tags) if ending.endswith(tag)), None)

    @property
    def has_closed_tag(self) -> bool:
        """The prompt ends a block of reasoning, so that the target does not begin one."""
        return self.prompt.rstrip().endswith((END_THINK, *self.tags.values()))

    def closing(self, tag: str) -> str:
        return self.tags.get(tag, END_THINK)

    def is_left_open(self, answer: str) -> bool:
        """Whether the prompt opens a tag that the answer does not close."""
        tag = self.open_tag
        return tag is not None and self.closing(tag) not in answer


def find_aside(message: Message, rendered: str, asked: Asked) -> SaidTurn | None:
    """An answer whose render does not begin with the prompt, though it is an answer to it.

    Either only white space before the answer differs, or the prompt goes on behind the header with
    a block that it closes itself (the empty thoughts of targets that are not to think), which the
    template leaves out of the history.
    """
    said = find_said(message, rendered)
    if said is None or said.has_calls or said.start == said.stop:
        return None
    before, given, prompt = (
        "".join(text.split()) for text in (rendered[: said.start], asked.given, asked.prompt)
    )
    is_block_closed = asked.open_tag is None and not message.get("reasoning_content")
    if before == prompt or (
        is_block_closed and before.startswith(given) and prompt.startswith(before)
    ):
        return SaidTurn(rendered[said.start :], 0, said.stop - said.start, False)
    return None


def spoken_text(message: Message, asked: Asked, *, is_whole: bool) -> str | None:
    """What a reasoning target said, its end-of-turn token aside; None if that is not known."""
    if message.get("tool_calls"):
        return None
    opened = asked.open_tag
    if opened is None and (THINK not in asked.tags or asked.has_closed_tag):
        return None
    tag = opened or THINK
    closing = asked.closing(tag)
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
