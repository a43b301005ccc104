"""A conversation as a chat template writes it up to each of its messages."""

from collections.abc import Sequence

from fledge.contracts.conversation import Message
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal, Tools

_PROBES = ("a", "b")
"""Two answers that share no letter: what their renders share is the template's."""


class ChatRenders:
    """Renders of one conversation, each made once."""

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

    def turn_start(self, k: int, prompt: str) -> int | None:
        """Where message k begins in its render; None when the template rewrites what is before."""
        full = self.upto(k + 1)
        given = (prompt, self.upto(k))
        return next((len(text) for text in given if full.startswith(text)), None)

    def unprompted_header(self, k: int) -> str:
        """The header of an answer where the template has none for a prompt, else nothing.

        It is what the renders of two answers without a letter in common have in common. White
        space alone is no header: it is what the target says first (Mistral's space).
        """
        prompt = self.prompt(k)
        if prompt != self.upto(k):
            return ""
        answers = ({"role": "assistant", "content": content} for content in _PROBES)
        try:
            first, second = (self._render([*self.messages[:k], one], asks=False) for one in answers)
        except TemplateRefusal:
            return ""
        shared = first[: first_difference(first, second)]
        header = shared.removeprefix(prompt) if shared.startswith(prompt) else ""
        return header.rstrip(" ") if header.strip() else ""

    def behind_last_words(self, k: int) -> tuple[str, str] | None:
        """What follows the words before message k: in the prompt, and in the render with it.

        Found with two contents in the place of those words: the renders end alike behind them.
        """
        last = self.messages[k - 1]
        given = [[*self.messages[: k - 1], {**last, "content": content}] for content in _PROBES]
        try:
            prompts = [self._render(messages, asks=True) for messages in given]
            fulls = [self._render([*one, self.messages[k]], asks=False) for one in given]
        except TemplateRefusal:
            return None
        return _shared_ending(*prompts), _shared_ending(*fulls)

    def text_behind(self, k: int) -> str:
        """What the template writes between message k and the words of whoever speaks next.

        Reasoning is left out, since templates drop it from a turn that is not the last.
        """
        answer = {key: v for key, v in self.messages[k].items() if key != "reasoning_content"}
        following: Message = {"role": "user", "content": _PROBES[0]}
        calls = answer.get("tool_calls")
        if calls:
            name = calls[0]["function"]["name"]
            following |= {"role": "tool", "name": name, "tool_call_id": calls[0].get("id")}
        given = [*self.messages[:k], answer]
        try:
            alone = self._render(given, asks=False)
            longer = self._render([*given, following], asks=False)
        except TemplateRefusal:
            return ""
        return longer.removeprefix(alone) if longer.startswith(alone) else ""

    def marks(self, num_messages: int) -> list[tuple[int, int, bool]]:
        """Tokens of the first messages, and which the template's generation block claims."""
        return self._tokenizer.generation_marks(self.messages[:num_messages], self._tools)

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


def _shared_ending(one: str, other: str) -> str:
    num_shared = first_difference(one[::-1], other[::-1])
    return one[len(one) - num_shared :]
