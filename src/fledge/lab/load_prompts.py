"""Prompts of a measurement: a suite's, or made-up ones of a fixed length.

Every arm gets the same prompts at the same load. Prompts are handed out in turn, so that a server
which keeps prefixes sees a prompt again only when the suite is used up.
"""

import random
from dataclasses import dataclass

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.conversation import Message
from fledge.lab.suites import Suite, load_suite

_WORDS = [
    "river",
    "stone",
    "light",
    "winter",
    "garden",
    "paper",
    "music",
    "window",
    "engine",
    "silver",
    "forest",
    "bridge",
    "letter",
    "summer",
    "number",
    "morning",
    "island",
    "market",
    "ocean",
    "valley",
    "copper",
    "feather",
    "harbour",
    "kitchen",
    "mountain",
    "orange",
    "pencil",
    "quiet",
    "rocket",
    "shadow",
    "thunder",
    "village",
    "water",
    "yellow",
    "anchor",
    "basket",
    "candle",
    "desert",
    "evening",
]


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """A conversation to be answered, and the text that a completion continues instead."""

    messages: tuple[Message, ...]
    text: str


class PromptSource:
    """Hands out the prompts of one measurement after the other."""

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        suite = None if settings.prompt_len else load_suite(settings.prompts)
        self._suite = [] if suite is None else _first_turns(suite)
        self.fingerprint = None if suite is None else suite.fingerprint
        """Of the suite; made-up prompts follow from the settings."""

    @property
    def label(self) -> str:
        settings = self._settings
        if not settings.prompt_len:
            return f"{settings.prompts}, {len(self._suite)} prompts"
        return f"made-up prompts of {settings.prompt_len} words"

    def take(self, number: int, start: int, count: int) -> list[LoadPrompt]:
        """Prompts of measurement `number`, before which `start` were handed out."""
        if self._suite:
            return [self._suite[(start + i) % len(self._suite)] for i in range(count)]
        return [self._made_up(f"{number} {i}") for i in range(count)]

    def _made_up(self, name: str) -> LoadPrompt:
        settings = self._settings
        words = _words(f"{settings.seed} prefix", settings.shared_prefix_len)
        rest = settings.prompt_len - settings.shared_prefix_len
        words += _words(f"{settings.seed} prompt {name}", rest)
        return user_prompt(" ".join(words))


def _words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(_WORDS, k=count)


def user_prompt(text: str) -> LoadPrompt:
    return LoadPrompt(({"role": "user", "content": text},), text)


def _first_turns(suite: Suite) -> list[LoadPrompt]:
    return [LoadPrompt(tuple(prompt.messages()), prompt.continuation()) for prompt in suite.prompts]
