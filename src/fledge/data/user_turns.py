"""Where a target's chat template puts what a user says, and what it writes behind.

Found by rendering: a conversation with a marker as the user's text is cut at the marker. What comes
before is where sampling starts, what comes behind says how a user turn ends.
"""

import os.path
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from fledge.contracts.conversation import Message
from fledge.contracts.errors import ConfigError
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal

_MARKERS = ("qzkvjx", "Vwyjqk 7")
"""Two, to see that the template writes the same around both."""

_REPLY: Message = {"role": "assistant", "content": "I see. And the next question?"}


class Around(NamedTuple):
    """What a template writes around a user turn."""

    before: str
    behind: str


class UserTurns:
    """The user turns of one target, or the beginnings of texts where it has no template."""

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._around = _around(tokenizer, None) if tokenizer.has_chat_template else Around("", "")
        self.is_raw = not self._around.before.strip()
        """Nothing tells a user turn from other text."""

        self.takes_system = not self.is_raw and self._takes_system()
        self.stop_token_ids, self.stop_texts = self._stops()

    def lead_ids(self, system: str | None, earlier: Sequence[str] = ()) -> list[int]:
        """Token ids up to the place where a user begins to write, who said something `earlier`."""
        if self.is_raw:
            return self._tokenizer.encode("")
        around = self._around
        if earlier:
            around = _around(self._tokenizer, system, _MARKERS[:1], self._said(earlier))
        elif system is not None:
            around = _around(self._tokenizer, system, _MARKERS[:1])
        # A space there belongs to the first word's token, which the target is to choose.
        return self._tokenizer.encode_all([around.before.rstrip(" ")])[0]

    @cached_property
    def marks(self) -> frozenset[str]:
        """Texts that no user writes: special tokens, and what stands next to user turns."""
        before, behind = (part.strip().splitlines() for part in self._around)
        found = {*self._tokenizer.special_tokens, *self.stop_texts, *before[-1:], *behind[:1]}
        return frozenset(text for text in found if len(text) > 2 and not text.isalnum())

    def _said(self, texts: Sequence[str]) -> list[Message]:
        """Turns of the user, each with what makes room for the next."""
        return [
            turn for text in texts for turn in ({"role": "user", "content": text}, *self._between)
        ]

    @cached_property
    def _between(self) -> tuple[Message, ...]:
        """What stands between two turns of the user: nothing, or a reply where a template refuses
        turns of one role in a row, runs them together or does not end them as the last one."""
        said: Message = {"role": "user", "content": _MARKERS[1]}
        for between in ((), (_REPLY,)):
            try:
                lead = _around(self._tokenizer, None, _MARKERS[:1], [said, *between]).before
            except (TemplateRefusal, ConfigError):
                continue
            if _MARKERS[1] in lead and self._begins_anew(lead.split(_MARKERS[1])[-1]):
                return between
        raise ConfigError(
            "the target's chat template does not show where a user begins to write behind earlier "
            "turns; leave `like` out with this target."
        )

    def _begins_anew(self, text: str) -> bool:
        """Whether behind a user's words a turn ends, and another begins as a first one does."""
        leads = (text.rstrip(" "), self._around.before.rstrip(" "))
        ids, first_ids = self._tokenizer.encode_all(leads)
        shared = os.path.commonprefix([ids[::-1], first_ids[::-1]])[::-1]
        if not self._tokenizer.decode(shared, keeps_special_tokens=True).strip():
            return False
        ends = any(one in ids for one in self.stop_token_ids)
        return ends or any(one in text for one in self.stop_texts)

    def _takes_system(self) -> bool:
        """Whether system prompts have a place of their own, outside the user turn."""
        marker = _MARKERS[0][::-1]
        try:
            before = _around(self._tokenizer, marker).before
        except (TemplateRefusal, ConfigError):
            return False
        return before.count(marker) == 1 and not before.startswith(self._around.before)

    def _stops(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The token that ends a user turn, or the text where no special token does."""
        if self.is_raw:
            return (), ()
        special_ids = set(self._tokenizer.special_tokens.values())
        behind = self._around.behind
        for token_id in self._tokenizer.encode_all([behind])[0]:
            if token_id in special_ids:
                return (token_id,), ()
            if self._tokenizer.decode([token_id]).strip():
                break
        text = behind.strip().split("\n")[0]
        return (), (text or "\n",)


def _around(
    tokenizer: TargetTokenizer,
    system: str | None,
    markers: Sequence[str] = _MARKERS,
    earlier: Sequence[Message] = (),
) -> Around:
    """Cut a rendered conversation at the user's text."""
    head = [] if system is None else [{"role": "system", "content": system}]
    lead = [*head, *earlier]
    found = []
    for marker in markers:
        messages = [*lead, {"role": "user", "content": marker}]
        parts = tokenizer.render(messages, add_generation_prompt=True).split(marker)
        if len(parts) != 2:
            raise ConfigError(
                f"the target's chat template writes a user turn {len(parts) - 1} times, so it does "
                "not show where a user begins; use other sources than `self` with this target."
            )
        found.append(Around(*parts))
    if found[0] != found[-1]:
        raise ConfigError(
            "what the target's chat template writes around a user turn depends on the turn "
            f"({found[0]} and {found[-1]}); use other sources than `self` with this target."
        )
    return found[0]
