"""What rows look like, counted in memory that does not grow with their number."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fledge.contracts.conversation import Conversation
from fledge.data.languages import guess_language

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
_EXACT_BITS = 7
"""Lengths keep this many leading bits: exact below 128, within 1.6 % above."""


class Lengths:
    """A histogram of whole numbers."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._max = 0

    def add(self, value: int) -> None:
        shift = max(0, value.bit_length() - _EXACT_BITS)
        self._counts[value >> shift << shift] += 1
        self._total += value
        self._max = max(self._max, value)

    def to_json(self) -> dict[str, Any]:
        """Mean, percentiles and the largest."""
        count = self._counts.total()
        if not count:
            return {}
        percentiles = {f"p{share}": self._percentile(share, count) for share in PERCENTILES}
        return {"mean": round(self._total / count, 1), **percentiles, "max": self._max}

    def _percentile(self, share: int, count: int) -> int:
        before = 0
        for value, rows in sorted(self._counts.items()):
            before += rows
            if before * 100 >= share * count:
                return value
        return self._max


@dataclass(slots=True)
class RowStatistics:
    """Counts over conversations."""

    rows: int = 0
    rows_by_source: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    user_turns: Lengths = field(default_factory=Lengths)
    chars: Lengths = field(default_factory=Lengths)
    prompt_chars: Lengths = field(default_factory=Lengths)

    def add(self, row: Conversation) -> None:
        self.rows += 1
        self.rows_by_source[row.origin.source] += 1
        roles = [message["role"] for message in row.messages]
        self.roles.update(roles)
        self.user_turns.add(roles.count("user"))
        self._add_features(row, roles)
        self._add_texts(row)

    def _add_features(self, row: Conversation, roles: list[str]) -> None:
        found = {
            "system_prompt": "system" in roles or "developer" in roles,
            "many_turns": roles.count("user") > 1,
            "tools": bool(row.tools),
            "tool_calls": any(message.get("tool_calls") for message in row.messages),
            "tool_results": "tool" in roles,
            "reasoning": any(message.get("reasoning_content") for message in row.messages),
        }
        self.features.update({name: int(is_there) for name, is_there in found.items()})

    def _add_texts(self, row: Conversation) -> None:
        texts = [(message["role"], message.get("content") or "") for message in row.messages]
        prompts = [text for role, text in texts if role == "user"]
        self.chars.add(sum(len(text) for _, text in texts))
        self.prompt_chars.add(sum(map(len, prompts)))
        guess = guess_language("\n".join(prompts or [text for _, text in texts]))
        self.languages[guess.language] += 1
        self.scripts[guess.script] += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "languages": _by_count(self.languages),
            "scripts": _by_count(self.scripts),
            "messages_by_role": _by_count(self.roles),
            "rows_with": dict(self.features),
            "user_turns": self.user_turns.to_json(),
            "chars": self.chars.to_json(),
            "prompt_chars": self.prompt_chars.to_json(),
        }


def _by_count(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
