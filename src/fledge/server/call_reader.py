"""Tool calls read while they are written: first the name, then the arguments piece by piece.

    {"name": "f", "arguments": {"x": 1}}
     ---------- head ---------- -------- arguments, handed out as they come

What has another order, or arguments in quotes, is read when it is whole.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fledge.server.call_formats import (
    CLOSE_CALL,
    MISTRAL_CALLS,
    CallFormat,
    new_call_id,
    parse_one,
    parse_whole,
)

_Stage = Literal["head", "arguments", "tail", "over"]

_OBJECT_HEAD = re.compile(
    r"[\s\[]*\{\s*"
    r'(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_BETWEEN = re.compile(r"[\s;,}\]]*")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call; the first one has its id and its name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As a stream shows it."""
        function = {"arguments": self.arguments}
        if self.id is None:
            return {"index": self.index, "function": function}
        function = {"name": str(self.name), **function}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


def whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Calls as a response that does not stream shows them."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """One piece for each call."""
    found: dict[int, CallDelta] = {}
    for delta in deltas:
        earlier = found.get(delta.index)
        if earlier is not None:
            delta = replace(earlier, arguments=earlier.arguments + delta.arguments)
        found[delta.index] = delta
    return list(found.values())


def head_pattern(kind: CallFormat, names: Sequence[str]) -> re.Pattern[str]:
    """What stands before the arguments of a call."""
    if kind != "mistral" or not names:
        return _OBJECT_HEAD
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    named = rf"\s*(?P<known>{known})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)"
    return re.compile(f"{_OBJECT_HEAD.pattern}|{named}", re.DOTALL)


class CallReader:
    """Reads the calls behind a mark, or those an answer consists of."""

    def __init__(
        self, kind: CallFormat, names: Sequence[str], *, first_index: int, max_calls: int | None
    ) -> None:
        self._kind, self._names = kind, names
        self._pattern = head_pattern(kind, names)
        self._index, self._max_calls = first_index, max_calls
        self._stage: _Stage = "head"
        self._object = _ObjectScanner()
        self._held = ""
        self.is_over = False
        """The mark was closed, or what follows is no call."""

        self.behind = ""
        """What follows then."""

        self.failed: str | None = None
        """What was taken for a call and is none."""

    @property
    def next_index(self) -> int:
        return self._index

    def feed(self, text: str) -> list[CallDelta]:
        self._held += text
        deltas: list[CallDelta] = []
        while not self.is_over and self._move(deltas):
            pass
        return self._allowed(deltas)

    def finish(self) -> list[CallDelta]:
        """Nothing will follow; what is no call after all is in `failed`."""
        deltas: list[CallDelta] = []
        if self._stage == "head" and self._held.strip():
            self._read_whole(self._held, deltas)
        return self._allowed(deltas)

    def _move(self, deltas: list[CallDelta]) -> bool:
        """One step; whether another may follow."""
        if self._stage == "head":
            return self._read_head(deltas)
        if self._stage == "arguments":
            size, is_whole = self._object.scan(self._held)
            if size:
                deltas.append(CallDelta(self._index, self._held[:size]))
                self._held = self._held[size:]
            if is_whole:
                self._index += 1
                self._stage = "tail"
            return is_whole
        return self._read_tail()

    def _read_head(self, deltas: list[CallDelta]) -> bool:
        match = self._pattern.match(self._held)
        if match is not None:
            name = match.groupdict().get("known") or json.loads(match[1], strict=False)
            if self._kind != "hermes" and name not in self._names:
                self._leave(failed=self._held)
                return False
            deltas.append(CallDelta(self._index, "", new_call_id(self._kind), name))
            self._held = self._held[match.end() :]
            self._object = _ObjectScanner()
            self._stage = "arguments"
            return True
        if self._kind == "hermes" and CLOSE_CALL in self._held:
            inside, closing, behind = self._held.partition(CLOSE_CALL)
            self._read_whole(inside, deltas, closing)
            self._leave(behind=behind)
        return False

    def _read_tail(self) -> bool:
        if self._kind == "hermes":
            _, found, behind = self._held.partition(CLOSE_CALL)
            if found:
                self._leave(behind=behind)
            return False
        match = _BETWEEN.match(self._held)
        self._held = self._held[match.end() :] if match else self._held
        if not self._held or MISTRAL_CALLS.startswith(self._held):
            return False
        self._held = self._held.removeprefix(MISTRAL_CALLS)
        self._stage = "head"
        return True

    def _read_whole(self, text: str, deltas: list[CallDelta], closing: str = "") -> None:
        is_hermes = self._kind == "hermes"
        calls = parse_one(text) if is_hermes else parse_whole(text, self._kind, self._names)
        if calls is None:
            self.failed = text + closing
        for call in calls or ():
            call_id = new_call_id(self._kind)
            deltas.append(CallDelta(self._index, call.arguments, call_id, call.name))
            self._index += 1

    def _leave(self, *, behind: str = "", failed: str | None = None) -> None:
        self.is_over, self.behind, self._held, self._stage = True, behind, "", "over"
        self.failed = self.failed if failed is None else failed

    def _allowed(self, deltas: list[CallDelta]) -> list[CallDelta]:
        """Without the calls that go beyond what was asked for."""
        if self._max_calls is None:
            return deltas
        return [delta for delta in deltas if delta.index < self._max_calls]


class _ObjectScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = self._is_escaped = False

    def scan(self, text: str) -> tuple[int, bool]:
        """How much of a piece belongs to the object, and whether it ends there."""
        for place, letter in enumerate(text):
            if self._is_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == '"':
                    self._is_text = False
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1, True
            elif letter == "<":
                return place, True  # no JSON: the target closed the call too early
        return len(text), False
