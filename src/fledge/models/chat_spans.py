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
from fledge.models.said import find_said, spoken_text
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal, Tools

_SHOWN_CHARS = 60
_PROBES = ("a", "b")
"""Two answers that share no letter: what their renders share is the template's."""


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
        renders = _Renders(self._tokenizer, messages, tools)
        return [self._turn(renders, k, answers[k]) for k in sorted(answers)]

    def _turn(self, renders: "_Renders", k: int, answer: Answer | None) -> AnsweredTurn:
        prompt = renders.prompt(k)
        message = renders.messages[k]
        if answer is not None and answer.token_ids is not None:
            return self._sampled_turn(prompt, message, k, answer.token_ids)
        self._refuse_spelled_end(message)
        is_whole = answer is None or answer.finish_reason in ("stop", "tool_calls")
        prompt += renders.unprompted_header(k)
        full = renders.upto(k + 1)
        end = self._find_end(full, renders.turn_start(k, prompt))
        if is_whole and end is None:
            raise UnclearTurn(
                "the template writes no end-of-turn token",
                f"message {k} is rendered without a special token at its end, so nothing says "
                f"where the target stops: {_tail(full)!r}",
            )
        stop = len(full) if end is None else end.start
        said = find_said(message, full[len(prompt) : stop]) if full.startswith(prompt) else None
        if said is not None:
            if renders.marks_generation:
                self._compare_with_marks(renders, k, _Span(len(prompt), stop))
            text = full[len(prompt) : end.stop if end else stop] if is_whole else said.as_cut
            return AnsweredTurn(message=k, prompt=prompt, answer=text)
        spoken = spoken_text(message, prompt, self._tokenizer.tags, is_whole=is_whole)
        if spoken is None:
            raise _unclear(prompt, full, message, k)
        ending = full[end.start : end.stop] if end is not None and is_whole else ""
        return AnsweredTurn(message=k, prompt=prompt, answer=spoken + ending)

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
        strange = [one for one in token_ids if not 0 <= one < self._tokenizer.num_tokens]
        text = "" if strange else self._tokenizer.decode(token_ids, keeps_special_tokens=True)
        # Text that came from an engine lacks the special tokens between its parts.
        texts = [] if strange else [text, self._tokenizer.decode(token_ids)]
        if all(find_said(message, one) is None for one in texts):
            shown = f"the unknown id {strange[0]}" if strange else repr(_tail(text))
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

    def _find_end(self, text: str, start: int) -> _Span | None:
        """The token that ends a rendered conversation, of which the last turn begins at `start`.

        Templates may write more than one special token there, and white space around them: the
        target stops at the first that ends its answers, or at the last if none is known to.
        """
        found: list[_Span] = []
        stop = len(text)
        while True:
            stop = start + len(text[start:stop].rstrip())
            token = max(
                (one for one in self._specials if text.endswith(one, start, stop)),
                key=len,
                default=None,
            )
            if token is None:
                break
            found.append(_Span(stop - len(token), stop))
            stop -= len(token)
        known = [span for span in found if text[span.start : span.stop] in self._ends]
        if known:
            return known[-1]
        return found[0] if found else None

    def _compare_with_marks(self, renders: "_Renders", k: int, answer: _Span) -> None:
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


class _Renders:
    """A conversation as the template writes it up to each message, each made once."""

    def __init__(
        self, tokenizer: TargetTokenizer, messages: Sequence[Message], tools: Tools
    ) -> None:
        self._tokenizer = tokenizer
        self.messages = list(messages)
        self._tools = tools
        self._made: dict[tuple[int, bool], str] = {}
        self.marks_generation = tokenizer.marks_generation(tools)

    def upto(self, num_messages: int) -> str:
        """The first messages, without anything that asks for an answer."""
        return self._once(num_messages, asks=False)

    def prompt(self, k: int) -> str:
        """What the target is given to answer with message k."""
        return self._once(k, asks=True)

    def turn_start(self, k: int, prompt: str) -> int:
        """Where message k begins in its render, at the latest before its end-of-turn token."""
        given = (prompt, self.upto(k))
        full = self.upto(k + 1)
        return next((len(text) for text in given if full.startswith(text)), 0)

    def unprompted_header(self, k: int) -> str:
        """The header of an answer where the template has none for a prompt, else nothing.

        It is what the renders of two answers without a letter in common have in common. White
        space alone is no header: it is what the target says first (Mistral's space).
        """
        prompt = self.prompt(k)
        if prompt != self.upto(k):
            return ""
        try:
            first, second = (
                self._render(
                    [*self.messages[:k], {"role": "assistant", "content": one}], asks=False
                )
                for one in _PROBES
            )
        except TemplateRefusal:
            return ""
        shared = first[: first_difference(first, second)]
        header = shared.removeprefix(prompt) if shared.startswith(prompt) else ""
        return header.rstrip(" ") if header.strip() else ""

    def marks(self, num_messages: int) -> list[tuple[int, int, bool]]:
        return self._tokenizer.generation_marks(self.messages[:num_messages], self._tools)

    def _render_answer(self, k: int, content: str) -> str:
        answer = {"role": "assistant", "content": content}
        return self._render([*self.messages[:k], answer], asks=False)

    def _once(self, num_messages: int, *, asks: bool) -> str:
        key = (num_messages, asks)
        if key not in self._made:
            self._made[key] = self._render(self.messages[:num_messages], asks=asks)
        return self._made[key]

    def _render(self, messages: list[Message], *, asks: bool) -> str:
        if not messages:
            raise TemplateRefusal("the conversation begins with an answer, so nothing was asked")
        return self._tokenizer.render(messages, self._tools, add_generation_prompt=asks)


def first_difference(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _unclear(prompt: str, full: str, message: Message, k: int) -> UnclearTurn:
    place = first_difference(prompt, full)
    if place == len(prompt):
        said = message.get("reasoning_content") or message.get("content") or ""
        return UnclearTurn(
            "the template changes what the target said",
            f"message {k} says {_tail(str(said))!r}, and the template renders it as "
            f"{_tail(full[place:])!r}",
        )
    around = slice(max(place - _SHOWN_CHARS, 0), place + _SHOWN_CHARS)
    return UnclearTurn(
        "the render of the answer does not begin with the prompt",
        f"message {k}: the prompt and the render with its answer part at character {place}\n"
        f"  prompt: {prompt[around]!r}\n  render: {full[around]!r}",
    )


def _tail(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN_CHARS else "…" + text[-2 * _SHOWN_CHARS :]
