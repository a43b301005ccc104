"""What a conversation asks, as words that can be compared.

Words are split at spaces and punctuation. Scripts that write no spaces (Chinese, Japanese, Thai,
Lao, Khmer, Burmese) have no words to split; there every character stands for itself. An n-gram of
words is then an n-gram of characters.
"""

import json
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

from fledge.contracts.conversation import Conversation, Message

_UNSPACED_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x2FDF),  # radicals
    (0x3005, 0x3007),
    (0x3040, 0x30FF),  # hiragana, katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_ZERO_WIDTH_SPACE = "\u200b"
_SHORT_LINE = 120
_LONG_LINE = 300
"""Characters of lines that may be a question, and of lines that may be what it is about."""


def is_unspaced(word: str) -> bool:
    """Whether a word is one character of a script without spaces."""
    point = ord(word[0])
    return point >= 0x0E00 and any(low <= point <= high for low, high in _UNSPACED_RANGES)


class _WordTable(dict[int, str]):
    """For `str.translate`: punctuation becomes a space, unspaced characters stand alone."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        category = unicodedata.category(character)
        if category == "Cf" and character != _ZERO_WIDTH_SPACE:
            written = ""  # joiners and soft hyphens are inside words
        elif character != "_" and category[0] in "PSZC":
            written = " "
        elif is_unspaced(character):
            written = f" {character} "
        else:
            written = character
        self[point] = written
        return written


_WORD_TABLE = _WordTable()


def fold(text: str) -> str:
    """Compatibility characters and case made equal; nothing else changes."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", folded)


def normalise(text: str) -> str:
    """Folded, with single spaces: texts that differ otherwise are different texts."""
    return " ".join(fold(text).split())


def split_words(folded: str) -> list[str]:
    """The words of a folded text, without punctuation."""
    return folded.translate(_WORD_TABLE).split()


class PromptSide(NamedTuple):
    """What the target is asked, without what assistants answered."""

    frame: str
    """System prompts and tool definitions, which whole sources may share."""

    turns: str
    """What users and tools said."""

    short_lines: str
    """Short lines of messages that also have a long one, such as a question about a document."""


def prompt_side(conversation: Conversation) -> PromptSide:
    """The two parts of a conversation's prompt, normalised; each message is one line."""
    frame: list[str] = []
    turns: list[str] = []
    short_lines: list[str] = []
    for message in conversation.messages:
        role, text = message["role"], content_text(message)
        if role in ("user", "tool"):
            turns.append(f"{role} {normalise(text)}")
            short_lines += _short_lines(text)
        elif role != "assistant":
            frame.append(normalise(text))
    frame += [normalise(tool_text(tool)) for tool in conversation.tools]
    return PromptSide("\n".join(frame), "\n".join(turns), "\n".join(short_lines))


def _short_lines(text: str) -> list[str]:
    lines = text.splitlines()
    if len(lines) < 2 or max(map(len, lines)) < _LONG_LINE:
        return []
    return [normalise(line) for line in lines if len(line) < _SHORT_LINE]


def all_texts(conversation: Conversation) -> Iterator[str]:
    """Every text of a conversation: messages, tool calls, tool definitions."""
    for message in conversation.messages:
        yield content_text(message)
        if "tool_calls" in message:
            yield _as_json(message["tool_calls"])
    yield from map(tool_text, conversation.tools)


def content_text(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    return content if isinstance(content, str) else _as_json(content)


def tool_text(tool: dict[str, Any]) -> str:
    return _as_json(tool)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
