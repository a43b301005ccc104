"""Where the assistant speaks in a rendered conversation, found by rendering it up to each turn.

For the assistant's message k of a conversation

    prompt = render(messages[:k], add_generation_prompt=True)     what the target was given
    full   = render(messages[:k + 1])                             the same with its answer
    answer = full[len(prompt):] up to its end-of-turn token       what the target said

No pattern is looked for in a template: whatever it writes, the answer is what it adds. A template
that does not let the answer be found so is refused with `UnclearTurn`, never guessed at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fledge.contracts.conversation import Answer, Message
from fledge.contracts.errors import RequestError
from fledge.models.chat_renders import ChatRenders, first_difference
from fledge.models.said import Asked, SaidTurn, find_aside, find_said, spoken_text
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal, Tools

_SHOWN_CHARS = 60


class UnclearTurn(RequestError):
    """What the target said cannot be told from what the template wrote."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        """A few words to count such rows by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTurn:
    """One answer of the target, and exactly what it was an answer to."""

    message: int
    """Index of the assistant's message."""

    prompt: str
    answer: str
    """What the target said, its end-of-turn token included unless it was cut off before."""

    token_ids: tuple[int, ...] | None = None
    """The answer as it was sampled, when that is known; then it counts instead of the text."""


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int


class TurnFinder:
    """Finds answers in conversations for one target."""

    def __init__(
        self, tokenizer: TargetTokenizer, eos_token_ids: frozenset[int], *, is_raw: bool = False
    ) -> None:
        """`is_raw`: answers continue the user's text as it stands, without the chat template."""
        self._tokenizer = tokenizer
        self.is_raw = is_raw or not tokenizer.has_chat_template
        known = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self._ends = {known[token_id] for token_id in eos_token_ids if token_id in known}
        self._specials = tuple(tokenizer.special_tokens)
        first = tokenizer.eos_token_id
        ordered = [first, *sorted(eos_token_ids)] if first in eos_token_ids else [*eos_token_ids]
        self._raw_end = next((known[one] for one in ordered if one in known), "")

    def find(
        self, messages: Sequence[Message], tools: Tools, answers: Mapping[int, Answer | None]
    ) -> list[AnsweredTurn]:
        """The turns at the given messages; None stands for an answer as it was recorded."""
        if self.is_raw:
            return [self._raw_turn(messages, k, answers[k]) for k in sorted(answers)]
        renders = ChatRenders(self._tokenizer, messages, tools)
        return [self._turn(renders, k, answers[k]) for k in sorted(answers)]

    def _turn(self, renders: ChatRenders, k: int, answer: Answer | None) -> AnsweredTurn:
        prompt = renders.prompt(k)
        message = renders.messages[k]
        if answer is not None and answer.token_ids is not None:
            return self._sampled_turn(prompt, message, k, answer.token_ids)
        self._refuse_spelled_end(message)
        is_whole = answer is None or answer.finish_reason in ("stop", "tool_calls")
        prompt += renders.unprompted_header(k)
        full = renders.upto(k + 1)
        end = self._find_end(full, renders.turn_start(k, prompt))
        stop = len(full) if end is None else end.start
        ending = self._next_end(renders, k) if end is None else full[end.start : end.stop]
        if is_whole and not ending:
            raise UnclearTurn(
                "the template writes no end-of-turn token",
                f"message {k} is rendered without a special token behind it, so nothing says "
                f"where the target stops: {_tail(full)!r}",
            )
        asked = Asked(renders.upto(k), prompt, self._tokenizer.tags)
        said = find_said(message, full[len(prompt) : stop]) if full.startswith(prompt) else None
        text: str | None
        if said is not None and not (is_whole and asked.is_left_open(said.text)):
            if renders.marks_generation:
                self._compare_with_marks(renders, k, _Span(len(prompt), stop))
            text = said.text if is_whole else said.as_cut
        else:
            text = _spoken(renders, k, asked, stop, is_whole=is_whole)
        if text is None:
            raise _unclear(asked, full, message, k)
        return AnsweredTurn(message=k, prompt=prompt, answer=text + (ending if is_whole else ""))

    def _refuse_spelled_end(self, message: Message) -> None:
        for part in (message.get("reasoning_content"), message.get("content")):
            spelled = next((end for end in sorted(self._ends) if end in str(part or "")), None)
            if spelled is not None:
                raise TemplateRefusal(
                    f"an answer spells {spelled} in its middle, where the target would have ended"
                )

    def _sampled_turn(
        self, prompt: str, message: Message, k: int, token_ids: tuple[int, ...]
    ) -> AnsweredTurn:
        """The target's own tokens; the text is only checked to be theirs."""
        largest = self._tokenizer.largest_token_id
        strange = next((one for one in token_ids if not 0 <= one <= largest), None)
        text = ""
        is_said = False
        if strange is None:
            text = self._tokenizer.decode(token_ids, keeps_special_tokens=True)
            # Text that came from an engine lacks the special tokens between its parts.
            is_said = find_said(message, text) is not None or (
                find_said(message, self._tokenizer.decode(token_ids)) is not None
            )
        if not is_said:
            shown = repr(_tail(text)) if strange is None else f"the unknown id {strange}"
            raise UnclearTurn(
                "the sampled token ids spell another text",
                f"message {k} says {_tail(str(message.get('content')))!r}, and its token ids end "
                f"in {shown}: they are of another tokenizer or another answer.",
            )
        return AnsweredTurn(message=k, prompt=prompt, answer=text, token_ids=token_ids)

    def _raw_turn(self, messages: Sequence[Message], k: int, answer: Answer | None) -> AnsweredTurn:
        roles = [str(message.get("role")) for message in messages[: k + 1]]
        if roles != ["user", "assistant"]:
            raise TemplateRefusal(
                "without a chat template a row must be one prompt and its answer; this one has "
                f"the roles {', '.join(roles)}"
            )
        prompt, text = (str(message.get("content") or "") for message in messages[:2])
        if answer is not None and answer.token_ids is not None:
            return self._sampled_turn(prompt, messages[k], k, answer.token_ids)
        is_whole = answer is None or answer.finish_reason == "stop"
        return AnsweredTurn(
            message=k, prompt=prompt, answer=text + (self._raw_end if is_whole else "")
        )

    def _find_end(self, text: str, start: int | None) -> _Span | None:
        """The token that ends a rendered conversation, of which the last turn begins at `start`.

        The target stops at the first token that is known to end answers. Where none is there, the
        last special token counts, if nothing but white space is behind it.
        """
        if start is not None:
            places = ((text.find(end, start), end) for end in self._ends)
            found = [_Span(place, place + len(end)) for place, end in places if place >= 0]
            if found:
                return min(found, key=lambda span: span.start)
        trimmed = text.rstrip()
        endings = [one for one in self._specials if trimmed.endswith(one, start or 0)]
        if not endings:
            return None
        return _Span(len(trimmed) - len(max(endings, key=len)), len(trimmed))

    def _next_end(self, renders: ChatRenders, k: int) -> str:
        """The token that ends answers and that the template writes only when somebody goes on.

        Some leave the last turn open; for others the header of the next speaker is the end.
        """
        behind = renders.text_behind(k).lstrip()
        return max((end for end in self._ends if behind.startswith(end)), key=len, default="")

    def _compare_with_marks(self, renders: ChatRenders, k: int, answer: _Span) -> None:
        """Refuse a template whose `{% generation %}` says something else than its renders.

        Its block may take in the header before an answer and what follows the end-of-turn token,
        and may leave that token out; the target's words must be in it, and nobody else's.
        """
        given = renders.upto(k)
        before = [i for i in range(k) if renders.messages[i].get("role") == "assistant"]
        earlier = renders.upto(before[-1] + 1) if before else ""
        full = renders.upto(k + 1)
        is_stable = full.startswith(given) and given.startswith(earlier)
        for start, stop, is_marked in renders.marks(k + 1):
            is_said = answer.start <= start and stop <= answer.stop and start < stop
            is_given = is_stable and len(earlier) <= start and stop <= len(given)
            if (is_said and not is_marked) or (is_given and is_marked):
                verb = "takes in" if is_marked else "leaves out"
                around = full[max(start - _SHOWN_CHARS, 0) : stop + _SHOWN_CHARS]
                raise UnclearTurn(
                    "the template's generation block differs from its renders",
                    f"message {k}: the template's generation block {verb} {full[start:stop]!r} at "
                    f"character {start}, in {around!r}",
                )


def _spoken(renders: ChatRenders, k: int, asked: Asked, stop: int, *, is_whole: bool) -> str | None:
    """What the target said, where the render with its answer does not hold both as they are."""
    message, full = renders.messages[k], renders.upto(k + 1)
    if not full.startswith(asked.prompt):
        said = _find_behind_header(renders, k, asked, len(full) - stop)
        if said is None:
            said = find_aside(message, full[:stop], asked)
        if said is not None:
            return said.text if is_whole else said.as_cut
    return spoken_text(message, asked, is_whole=is_whole)


def _find_behind_header(
    renders: ChatRenders, k: int, asked: Asked, num_behind: int
) -> SaidTurn | None:
    """An answer behind the same header as in the prompt, though earlier text is another.

    Some templates move what is not a turn of its own: a system prompt, or the tools, that stand in
    the last question, and only while it waits for an answer.
    """
    header, rest = renders.behind_last_words(k) or ("", "")
    if not header.strip() or not rest.startswith(header):
        return None
    said = find_said(renders.messages[k], rest[len(header) : len(rest) - num_behind])
    return None if said is None or asked.is_left_open(said.text) else said


def _unclear(asked: Asked, full: str, message: Message, k: int) -> UnclearTurn:
    prompt = asked.prompt
    place = first_difference(prompt, full)
    around = slice(max(place - _SHOWN_CHARS, 0), place + _SHOWN_CHARS)
    renders = f"\n  prompt: {prompt[around]!r}\n  render: {full[around]!r}"
    if asked.open_tag is not None and not message.get("reasoning_content"):
        return UnclearTurn(
            "the prompt opens a block of reasoning, and the answer brings none",
            f"message {k}: the prompt ends in {asked.open_tag}, and the answer has no reasoning "
            f"that closes it{renders}",
        )
    if place == len(prompt):
        said = str(message.get("reasoning_content") or message.get("content") or "")
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        what = f"calls {', '.join(names)}" if names else f"says {_tail(said)!r}"
        return UnclearTurn(
            "the template changes what the target said",
            f"message {k} {what}, and the template renders it as {_tail(full[place:])!r}",
        )
    return UnclearTurn(
        "the render of the answer does not begin with the prompt",
        f"message {k}: the prompt and the render with its answer part at character {place}"
        f"{renders}",
    )


def _tail(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN_CHARS else "…" + text[-2 * _SHOWN_CHARS :]
