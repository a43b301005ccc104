"""A target's tokenizer and chat template: the one place where text becomes token ids and back."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fledge.contracts.conversation import Message
from fledge.contracts.errors import ArtifactError, RequestError
from fledge.models.quiet import first_line
from fledge.models.template_facts import asks_the_date, marks_generation, stop_clock

Tools = Sequence[Mapping[str, Any]]

_FILE = "tokenizer.json"


class TemplateRefusal(RequestError):
    """These messages do not go through the target's chat template."""


class TargetTokenizer:
    """Text to ids and back, the target's way."""

    def __init__(
        self, tokenizer: Any, *, directory: Path | None = None, day: date | None = None
    ) -> None:
        """`day` is what templates that write today's date get instead of it."""
        self._tokenizer = tokenizer
        self._directory = directory
        self._day = day

    @classmethod
    def load(cls, directory: Path) -> "TargetTokenizer":
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,  # otherwise transformers asks at the terminal
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"no usable tokenizer in {directory}: {first_line(error)}. A target directory "
                "needs tokenizer.json (or its predecessors) and tokenizer_config.json."
            ) from error
        return cls(tokenizer, directory=directory)

    def on_day(self, day: date) -> "TargetTokenizer":
        """The same tokenizer, for which it is always this day."""
        return TargetTokenizer(self._tokenizer, directory=self._directory, day=day)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def template_text(self) -> str:
        """The chat templates as they are written, for whoever looks for what they teach."""
        return "\n".join(self._templates.values())

    @property
    def num_tokens(self) -> int:
        return len(self._tokenizer)

    def spelling(self, token_id: int) -> str:
        """A token as the vocabulary writes it, spaces and bytes in disguise."""
        found = self._tokenizer.convert_ids_to_tokens(token_id)
        return "" if found is None else str(found)

    @cached_property
    def largest_token_id(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1)

    @property
    def eos_token_id(self) -> int | None:
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that stand for no text of their own, by how templates write them."""
        added = self._tokenizer.added_tokens_decoder.items()
        found = {token.content: token_id for token_id, token in added if token.special}
        named = self._tokenizer.all_special_tokens
        return found | dict(zip(named, self._tokenizer.convert_tokens_to_ids(named), strict=True))

    @cached_property
    def tags(self) -> dict[str, str]:
        """Tokens such as `<think>`, with those that close what they open."""
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        pairs = {token: f"</{token[1:]}" for token in added if token.startswith("<")}
        return {token: closing for token, closing in pairs.items() if closing in added}

    @cached_property
    def asks_the_date(self) -> bool:
        return any(asks_the_date(template) for template in self._templates.values())

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a later stage must agree with: hashes of vocabulary, template, special tokens."""
        file = self._directory / _FILE if self._directory is not None else None
        if file is not None and file.is_file():
            vocabulary = file.read_bytes()
        else:
            vocabulary = json.dumps(sorted(self._tokenizer.get_vocab().items())).encode()
        parts = {
            "vocabulary": hashlib.sha256(vocabulary).hexdigest(),
            "chat_template": _hash_json(self._templates) if self._templates else None,
            "special_tokens": _hash_json(self.special_tokens | self._tokenizer.special_tokens_map),
        }
        return {**parts, "sha256": _hash_json(parts)}

    def backend_json(self) -> str:
        """The tokenizer as the library behind it stores it: vocabulary, rules, added tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("grammars need a fast tokenizer (tokenizer.json); this one is not.")
        return str(backend.to_str())

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands, with the special tokens the target starts texts with."""
        return self.encode_all([text], adds_special_tokens=True)[0]

    def encode_all(
        self, texts: Sequence[str], *, adds_special_tokens: bool = False
    ) -> list[list[int]]:
        """Ids of several texts, each on its own; many at once are faster on several cores."""
        if not texts:
            return []
        encoded = self._tokenizer(
            list(texts), add_special_tokens=adds_special_tokens, verbose=False
        )
        return [[int(token) for token in ids] for ids in encoded["input_ids"]]

    def encode_chat(
        self, messages: Sequence[Message], tools: Tools = (), **variables: Any
    ) -> list[int]:
        """Ids of a conversation, ready for the target's answer; templates may know variables."""
        text = self.render(messages, tools, **{"add_generation_prompt": True, **variables})
        # The template writes the special tokens itself: adding them again would double the BOS.
        return self.encode_all([text])[0]

    def encode_prompt(self, prompt: str, *, raw: bool = False) -> list[int]:
        """Ids of a user's prompt: as a chat when the target has a template, unless `raw`."""
        if raw or not self.has_chat_template:
            return self.encode(prompt)
        return self.encode_chat([{"role": "user", "content": prompt}])

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """A conversation as the template writes it, ready for the target's answer or not."""
        options = {**variables, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        return str(self._apply(messages, tools, **options))

    def marks_generation(self, tools: Tools = ()) -> bool:
        """Whether the template itself says what the assistant wrote."""
        return marks_generation(self._template(tools))

    def generation_marks(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> list[tuple[int, int, bool]]:
        """Where each token of the rendered conversation begins and ends, and whether the
        template's `{% generation %}` claims it."""
        encoded = self._apply(
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        pairs = zip(encoded["offset_mapping"], encoded["assistant_masks"], strict=True)
        return [(start, stop, bool(is_marked)) for (start, stop), is_marked in pairs]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        keeps_special_tokens: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> str:
        """Text of the ids, special tokens left out unless all or these are asked for."""
        if shown:
            hidden = self._special_ids - shown
            token_ids = [token_id for token_id in token_ids if token_id not in hidden]
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=not (keeps_special_tokens or shown),
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @property
    def _templates(self) -> dict[str, str]:
        """Chat templates by name; most targets have one, some a second one for tools."""
        found = self._tokenizer.chat_template or {}
        return {"default": found} if isinstance(found, str) else dict(found)

    def _template(self, tools: Tools) -> str:
        return str(self._tokenizer.get_chat_template(None, list(tools) or None))

    def _apply(self, messages: Sequence[Message], tools: Tools, **options: Any) -> Any:
        """The template's output for the first form of the messages that it takes."""
        refusal: TemplateRefusal | None = None
        for form in self._forms(list(messages), tools):
            try:
                return self._apply_as_is(form, tools, options)
            except TemplateRefusal as error:
                refusal = refusal or error
        assert refusal is not None, "there is always one form"
        raise refusal

    def _forms(self, messages: list[Message], tools: Tools) -> Iterator[list[Message]]:
        """The messages as templates want them, the usual form first.

        Most see arguments of tool calls as tables, as servers show them; a few paste the text that
        the API has. A turn that only calls tools has no content, which some cannot add to a text.
        """
        parsed = [_with_parsed_arguments(message) for message in messages]
        is_silent = any(message.get("content", "") is None for message in messages)
        if not (is_silent and _prints_none(self._tokenizer, self._template(tools))):
            yield parsed
        if is_silent:
            yield [_with_text(message) for message in parsed]
        if parsed != messages:
            yield messages
            if is_silent:
                yield [_with_text(message) for message in messages]

    def _apply_as_is(
        self, messages: list[Message], tools: Tools, options: Mapping[str, Any]
    ) -> Any:
        variables: Mapping[str, Any] = {}
        try:
            if self._day is not None and self.asks_the_date:
                template, variables = stop_clock(self._template(tools), self._day)
                options = {**options, "chat_template": template}
            return self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, **options, **variables
            )
        except Exception as error:  # templates are programs and raise what they like
            raise TemplateRefusal(
                f"the target's chat template refuses these messages: {first_line(error)}"
            ) from error


@lru_cache
def _prints_none(tokenizer: Any, template: str) -> bool:
    """Whether a template writes the word None for a turn that only calls tools."""
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}, turn], chat_template=template, tokenize=False
        )
    except Exception:  # it may want tools, or other roles
        return False
    return "None" in text


def _with_text(message: Message) -> Message:
    return {**message, "content": ""} if message.get("content", "") is None else message


def _with_parsed_arguments(message: Message) -> Message:
    """Tool calls with their arguments as tables: in the API they are a text that holds JSON."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_parsed_call(call) for call in message["tool_calls"]]}


def _with_parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _hash_json(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
