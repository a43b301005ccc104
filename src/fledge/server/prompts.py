"""From what a client sends to token ids, without holding up the event loop.

Tokenizing runs in threads: one for prompts of ordinary length, one for long ones, so that a book
does not make everybody wait. Each has a tokenizer of its own, since they are not made for sharing.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fledge.contracts.conversation import Message
from fledge.contracts.errors import RequestError
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal
from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_requests import ChatMessage, ChatRequest, ContentPart, Tool, unsupported
from fledge.server.message_parts import MessageSplitter
from fledge.server.target_marks import Reasoning, TargetMarks
from fledge.server.token_text import TokenText

T = TypeVar("T")
Variables = Mapping[str, str | bool | int | float]

_LONG_CHARACTERS = 50_000
_TAIL_TOKENS = 16
"""The tag of a prompt that opens the reasoning is within its last few tokens."""

_RESERVED = frozenset(
    (
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
"""Variables of a template that a client may not set: they steer the tokenizer, not the template."""


class _Lane:
    """A tokenizer and the one thread that uses it."""

    def __init__(self, tokenizer: TargetTokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"fledge-{name}")

    async def run(self, work: Callable[[TargetTokenizer], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, work, self._tokenizer)
        except RequestError as error:
            raise InvalidRequestError(str(error)) from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class PromptReader:
    """Reads prompts the target's way."""

    def __init__(self, short: TargetTokenizer, long: TargetTokenizer) -> None:
        self._short, self._long = _Lane(short, "tokenizer"), _Lane(long, "long-tokenizer")
        self.has_chat_template = short.has_chat_template
        self.token_text = TokenText(short)
        self.marks = TargetMarks.of(short)

    @classmethod
    def load(cls, target_dir: Path) -> "PromptReader":
        return cls(TargetTokenizer.load(target_dir), TargetTokenizer.load(target_dir))

    def close(self) -> None:
        self._short.close()
        self._long.close()

    async def read_text(self, text: str, *, adds_special_tokens: bool = True) -> tuple[int, ...]:
        def work(tokenizer: TargetTokenizer) -> list[int]:
            return tokenizer.encode_all([text], adds_special_tokens=adds_special_tokens)[0]

        if not text:
            raise InvalidRequestError("the prompt is empty.", param="prompt")
        return tuple(await self._lane(len(text)).run(work))

    async def read_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        variables: Variables | None,
    ) -> tuple[int, ...]:
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this target has no chat template, so it cannot read a conversation; use "
                "/v1/completions.",
                param="messages",
            )
        plain = [plain_message(message) for message in messages]
        definitions = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        chosen = _checked_variables(variables)

        def work(tokenizer: TargetTokenizer) -> list[int]:
            try:
                return tokenizer.encode_chat(plain, definitions, **chosen)
            except TemplateRefusal:
                older = [_without_developer(message) for message in plain]
                if older == plain:
                    raise
                return tokenizer.encode_chat(older, definitions, **chosen)

        size = sum(len(str(message.get("content") or "")) for message in plain)
        return tuple(await self._lane(size).run(work))

    async def write_text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt that was given as token ids."""

        def work(tokenizer: TargetTokenizer) -> str:
            return tokenizer.decode(token_ids)

        return await self._lane(len(token_ids)).run(work)

    def reasoning_after(self, prompt: Sequence[int]) -> Reasoning:
        """What may come first in the answer to a prompt."""
        if not self.marks.can_think:
            return "none"
        tail = "".join(self.token_text.text_of(one) for one in prompt[-_TAIL_TOKENS:])
        return self.marks.reasoning_after(tail)

    def splitting(
        self, chat: ChatRequest, reasoning: Reasoning
    ) -> Callable[[], MessageSplitter] | None:
        """How answers to a chat are taken apart; None when they are only content."""
        tools = chat.offered_tools
        calls = self.marks.calls if tools else None
        if calls is None and reasoning == "none":
            return None
        return partial(
            MessageSplitter,
            can_think=reasoning != "none",
            is_thinking=reasoning == "open",
            calls=calls,
            tool_names=tuple(tool.function.name for tool in tools or ()),
            max_calls=None if chat.may_call_several else 1,
        )

    def _lane(self, num_characters: int) -> _Lane:
        return self._long if num_characters > _LONG_CHARACTERS else self._short


def plain_message(message: ChatMessage) -> Message:
    """A message as chat templates read it."""
    plain: Message = {"role": message.role, "content": _text_of(message.content)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls
        ]
    return plain


def _text_of(content: str | list[ContentPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type != "text" or part.text is None:
            raise unsupported(f"content of type {part.type!r}; the target reads text", "messages")
        texts.append(part.text)
    return "\n".join(texts)


def _without_developer(message: Message) -> Message:
    """Older templates know system messages only."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _checked_variables(variables: Variables | None) -> dict[str, Any]:
    chosen = dict(variables or {})
    if taken := sorted(_RESERVED & chosen.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs may not set {', '.join(taken)}.", param="chat_template_kwargs"
        )
    return chosen
