"""Settings of the stage prepare."""

import difflib
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fledge.contracts.errors import ConfigError
from fledge.contracts.toml_settings import read_settings, to_plain

BadRows = Literal["skip", "stop"]
PrivacyAction = Literal["replace", "drop", "keep"]
SourceFormat = Literal[
    "auto", "chat", "sharegpt", "alpaca", "prompts", "tasks", "bfcl", "completions"
]

PRIVACY_TYPES = (
    "email",
    "phone",
    "card",
    "iban",
    "national_id",
    "ip",
    "mac",
    "wallet",
    "secret",
    "name",
    "place",
)
"""What the privacy filter knows; `name` and `place` need `privacy.names`."""

SELF = "self"
"""The path of a source whose prompts the target writes itself."""


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name} is {value}; it must be {limit}.")


def check_penalty(value: float | None) -> None:
    if value is not None:
        check_range("repetition_penalty", value, 0.01, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfSettings:
    """Prompts that the target writes itself, for sources with `path = "self"`."""

    rows: int = 1000
    temperature: float = 1.0
    top_p: float = 0.9
    """Small targets write nonsense when they may choose any token."""

    max_tokens: int = 256
    system_prompts: tuple[str, ...] = ()
    """Empty takes the built-in list; so do topics and languages."""

    topics: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    like: str = ""
    """A source before this one, whose prompts are shown: what is written goes on with them."""

    shown: int = 4
    """How many of them, others in every try."""

    def __post_init__(self) -> None:
        check_range("rows", self.rows, 1)
        check_range("shown", self.shown, 1, 32)
        check_range("temperature", self.temperature, 0.1, 5.0)
        check_range("top_p", self.top_p, 0.01, 1)
        check_range("max_tokens", self.max_tokens, 4)


def decisive_self(settings: SelfSettings) -> dict[str, Any]:
    """The settings as plans have them: without examples as before there were any, so that work
    begun then goes on."""
    plain: dict[str, Any] = to_plain(settings)
    if not settings.like:
        del plain["like"]
        # A source may name what it is like by itself, and take only this from here.
        if settings.shown == SelfSettings().shown:
            del plain["shown"]
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """One source of conversations."""

    name: str
    path: tuple[str, ...]
    """Files, globs, directories, s3:// or gs:// objects, `hf://owner/name`, or `self`."""

    licence: str
    """As its owner states it; an SPDX name where there is one."""

    format: SourceFormat = "auto"
    weight: float = 1.0
    """Its share in the blend relative to the other sources, when `prepare.rows` sets a total."""

    max_rows: int = 0
    """Most rows taken from it; 0 takes all."""

    variants: int = 0
    """In place of each row so many variants of it, with other numbers, first names and
    things; 0 takes the row itself."""

    self_prompts: dict[str, Any] = field(default_factory=dict)
    """Single settings that are others for this source than in `prepare.self_prompts`."""

    @property
    def is_self(self) -> bool:
        """The target writes its prompts."""
        return self.path == (SELF,)

    def __post_init__(self) -> None:
        if not self.name.strip() or "/" in self.name:
            raise ConfigError(f"a source is named {self.name!r}; use a name without slashes.")
        if not self.path or not all(path.strip() for path in self.path):
            raise ConfigError(f"source {self.name} has no path, or an empty one.")
        if SELF in self.path and len(self.path) > 1:
            raise ConfigError(
                f"source {self.name} mixes {SELF!r} with other paths; make two sources of it."
            )
        if not self.licence.strip():
            raise ConfigError(
                f"source {self.name} declares no licence; write what its owner states."
            )
        check_range(f"weight of source {self.name}", self.weight, 0, 1_000_000)
        check_range(f"max_rows of source {self.name}", self.max_rows, 0)
        check_range(f"variants of source {self.name}", self.variants, 0, 1000)
        if self.self_prompts and not self.is_self:
            raise ConfigError(
                f"source {self.name} has self_prompts and the path {', '.join(self.path)}, where "
                f"nobody writes any; leave them out, or make the path {SELF!r}."
            )
        self.self_settings(SelfSettings())  # what cannot be read is told at once

    def self_settings(self, common: SelfSettings) -> SelfSettings:
        """How its prompts are written: as those of all `self` sources but for its own settings."""
        own = read_settings(SelfSettings, self.self_prompts, where=f"{self.name}.self_prompts")
        return replace(common, **{name: getattr(own, name) for name in self.self_prompts})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySettings:
    """What happens to personal and financial identifiers."""

    enabled: bool = True
    default: PrivacyAction = "replace"
    """`replace` by a stable placeholder, `drop` the row, or `keep`."""

    actions: dict[str, PrivacyAction] = field(default_factory=dict)
    """Other actions for single types, as `email = "drop"`."""

    names: bool = False
    """Also look for names and places with the named-entity plug-in (extra `names`)."""

    names_min_score: float = 0.85
    """Tags of the plug-in with a lower score do not count."""

    def action(self, kind: str) -> PrivacyAction:
        """What happens to identifiers of a type."""
        return self.actions.get(kind, self.default)

    def __post_init__(self) -> None:
        for kind in self.actions:
            if kind not in PRIVACY_TYPES:
                near = difflib.get_close_matches(kind, PRIVACY_TYPES, n=1)
                known = f"known are {', '.join(PRIVACY_TYPES)}."
                hint = f"did you mean {near[0]!r}?" if near else known
                raise ConfigError(f"actions names {kind!r}, which is no type; {hint}")
        check_range("names_min_score", self.names_min_score, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateSettings:
    """Which rows are the same."""

    exact: bool = True
    near: bool = True
    threshold: float = 0.8
    """Estimated Jaccard similarity of word 5-grams above which two rows are near duplicates."""

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0.3, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecontaminateSettings:
    """Which prompts are for measuring and must not be trained on."""

    against: tuple[str, ...] = ()
    """Files of benchmark prompts; empty checks nothing."""

    ngram: int = 13
    """Words in a row that two texts must share to count as overlap; shorter prompts must be
    contained as a whole."""

    def __post_init__(self) -> None:
        check_range("ngram", self.ngram, 3, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """From sources to clean conversations."""

    sources: tuple[SourceSettings, ...]
    licences: tuple[str, ...] = ()
    """Licences that may be used; empty allows whatever the sources declare."""

    rows: int = 0
    """Rows in the blend, shared by weight; 0 keeps every row that passes the filters."""

    seed: int = 0
    on_bad_row: BadRows = "skip"
    max_turn_chars: int = 200_000
    """Rows with a longer turn are left out."""

    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    duplicates: DuplicateSettings = field(default_factory=DuplicateSettings)
    decontaminate: DecontaminateSettings = field(default_factory=DecontaminateSettings)
    self_prompts: SelfSettings = field(default_factory=SelfSettings)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("there are no sources; name at least one.")
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two sources have the name {twice[0]!r}; names must differ.")
        for source in self.sources:
            if self.licences and source.licence not in self.licences:
                raise ConfigError(
                    f"source {source.name} has the licence {source.licence!r}, and the recipe "
                    f"allows {', '.join(self.licences)}; leave the source out or allow it."
                )
        for number, source in enumerate(self.sources):
            like = source.self_settings(self.self_prompts).like if source.is_self else ""
            if like and like not in names[:number]:
                before = ", ".join(names[:number]) or "none"
                raise ConfigError(
                    f"source {source.name} is to be like {like!r}, which is not among the sources "
                    f"before it ({before}); name one of those, or move that one up."
                )
        if self.rows and not any(source.weight for source in self.sources):
            raise ConfigError("every source has weight 0, so none can give rows to the blend.")
        check_range("rows", self.rows, 0)
        check_range("max_turn_chars", self.max_turn_chars, 100)
