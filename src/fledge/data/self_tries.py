"""What a target is asked for when it writes prompts: everything about a try, by its number."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from fledge.contracts.data_settings import SelfSettings, SourceSettings
from fledge.contracts.errors import ConfigError
from fledge.data.self_topics import LANGUAGES, SYSTEM_PROMPTS, TOPICS, Language
from fledge.data.user_turns import UserTurns
from fledge.models.tokenizer import TargetTokenizer

HINT = "You talk with a user about"
_ANY_LANGUAGE = Language("any", (), ())

_RAW_TOKENS = (8, 64)
"""Fewest and most tokens by which a raw text is continued: it has no end of its own."""


class Try(NamedTuple):
    """What one try asks for."""

    seed: int
    system: str
    """The system prompt that the row gets; empty for none."""

    language: Language
    lead_ids: list[int]
    opener: str
    """What the text is begun with; empty when the target begins."""

    opener_ids: list[int]
    max_tokens: int


class TryPlanner:
    """Chooses what each try of a source asks for."""

    def __init__(self, turns: UserTurns, tokenizer: TargetTokenizer, context_len: int) -> None:
        self._turns = turns
        self._tokenizer = tokenizer
        self._context_len = context_len

    def plan(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        number: int,
        examples: Sequence[str] = (),
    ) -> Try:
        """Everything that a try depends on, chosen by its number."""
        own_seed = xxhash.xxh3_64_intdigest(f"{seed}/{source.name}/{number}".encode()) >> 1
        draw = random.Random(own_seed)
        if examples:
            return self._go_on(source, settings, own_seed, draw, examples)
        system, topic, language = _choose(settings, draw)
        max_tokens = settings.max_tokens
        steering, opener = None, ""
        if self._turns.takes_system:
            hint = f"{HINT} {topic}. The user writes in {language.name}."
            steering = f"{system} {hint}".strip()
        else:
            system = ""
            if self._turns.is_raw or language.name != "English" or draw.random() < 0.5:
                opener = draw.choice(language.openers).format(topic=topic)
        if self._turns.is_raw:
            fewest, most = _RAW_TOKENS
            max_tokens = draw.randint(min(fewest, max_tokens), min(most, max_tokens))
        return Try(
            seed=own_seed,
            system=system,
            language=language,
            lead_ids=self._turns.lead_ids(steering),
            opener=opener,
            opener_ids=self._tokenizer.encode_all([opener])[0] if opener else [],
            max_tokens=max_tokens,
        )

    def _go_on(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        draw: random.Random,
        examples: Sequence[str],
    ) -> Try:
        """A try behind examples, which say all that topics and languages would."""
        system = draw.choice(settings.system_prompts or ("",)) if self._turns.takes_system else ""
        lead_ids = self._lead_that_fits(settings, system, draw.sample(examples, settings.shown))
        if lead_ids is None:
            lead_ids = self._lead_that_fits(settings, system, [min(examples, key=len)])
        if lead_ids is None:
            raise ConfigError(
                f"source {source.name} is to be like {settings.like}, and not one prompt of it "
                f"fits the target's context of {self._context_len:,} tokens beside max_tokens = "
                f"{settings.max_tokens:,}; lower max_tokens, or name another source."
            )
        return Try(
            seed=seed,
            system=system,
            language=_ANY_LANGUAGE,
            lead_ids=lead_ids,
            opener="",
            opener_ids=[],
            max_tokens=settings.max_tokens,
        )

    def _lead_that_fits(
        self, settings: SelfSettings, system: str, examples: Sequence[str]
    ) -> list[int] | None:
        """The lead behind examples, without the longest ones where the context is too small.

        The context decides, not an engine's memory: rows must not depend on the machine.
        """
        shown = list(examples)
        while shown:
            lead_ids = self._turns.lead_ids(system or None, shown)
            if len(lead_ids) + settings.max_tokens <= self._context_len:
                return lead_ids
            shown.remove(max(shown, key=len))
        return None


def _choose(settings: SelfSettings, draw: random.Random) -> tuple[str, str, Language]:
    """A system prompt, a topic and a language; half of the built-in choices are no system prompt
    and English."""
    if settings.system_prompts:
        system = draw.choice(settings.system_prompts)
    else:
        system = draw.choice(("", draw.choice(SYSTEM_PROMPTS)))
    topic = draw.choice(settings.topics or TOPICS)
    if settings.languages:
        return system, topic, _language(draw.choice(settings.languages))
    return system, topic, draw.choice((LANGUAGES[0], draw.choice(LANGUAGES[1:])))


def _language(name: str) -> Language:
    """A language of the built-in list, or any other: its letters are then not checked."""
    found = [one for one in LANGUAGES if one.name.casefold() == name.casefold()]
    return found[0] if found else Language(name, (), LANGUAGES[0].openers)
