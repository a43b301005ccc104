"""What a suite asks: conversations, and how their answers are checked where that can be done."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fledge.contracts.conversation import Message
from fledge.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberCheck:
    """The last number of the answer must be this one."""

    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheck:
    """The function in the answer must pass a test."""

    stub: str
    """Imports, signature and docstring: what the function begins with."""

    entry_point: str
    test: str
    """Python code that defines `check(candidate)`."""


Check = NumberCheck | ProgramCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation. Turns after the first continue the target's own answers."""

    id: str
    """Different from all others of its suite."""

    task: str
    turns: tuple[str, ...]
    system: str | None = None
    raw: str | None = None
    """What a target without a chat template continues, where it is not the first turn itself."""

    check: Check | None = None
    """Of the last answer."""

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """The conversation up to the turn that follows these answers."""
        assert len(answers) < len(self.turns), "every turn is answered already"
        found: list[Message] = []
        if self.system is not None:
            found.append({"role": "system", "content": self.system})
        for turn, answer in zip(self.turns, answers, strict=False):
            found += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": answer},
            ]
        return [*found, {"role": "user", "content": self.turns[len(answers)]}]

    def continuation(self, answers: Sequence[str] = ()) -> str:
        """The same as one text, for a target without a chat template."""
        first = self.raw if self.raw is not None else self.turns[0]
        turns = [first, *self.turns[1:]]
        system = [] if self.system is None else [f"{self.system}\n\n"]
        before = [
            f"{turn}{answer}\n\n"
            for turn, answer in zip(turns[: len(answers)], answers, strict=True)
        ]
        return "".join([*system, *before, turns[len(answers)]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Prompts to measure on, by task."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str
    """Where they come from: a file, an address, or `built-in`."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order in which they first come."""
        return tuple(dict.fromkeys(prompt.task for prompt in self.prompts))

    @property
    def fingerprint(self) -> str:
        """The same prompts have the same one, wherever they come from."""
        plain = json.dumps([asdict(prompt) for prompt in self.prompts], sort_keys=True)
        return hashlib.sha256(plain.encode("utf-8", errors="backslashreplace")).hexdigest()

    def only(self, tasks: Sequence[str]) -> "Suite":
        """The prompts of some tasks."""
        unknown = [task for task in tasks if task not in self.tasks]
        if unknown:
            raise ConfigError(
                f"suite {self.name} has no task {unknown[0]!r}; it has {', '.join(self.tasks)}."
            )
        chosen = tuple(prompt for prompt in self.prompts if prompt.task in tasks)
        return Suite(name=self.name, prompts=chosen, source=self.source)
