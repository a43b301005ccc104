"""Settings of the stage regenerate."""

from dataclasses import dataclass, field
from typing import Literal

from fledge.contracts.data_settings import check_penalty, check_range
from fledge.contracts.errors import ConfigError
from fledge.contracts.settings import EngineSettings

Turns = Literal["last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateSettings:
    """The target answers every conversation again."""

    turns: Turns = "last"
    """`last` drops the last assistant turn and asks for it; `all` asks for each in order."""

    answers: int = 1
    """Answers to each row, each at the next of the temperatures."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """One is chosen per row by its id, evenly."""

    source_temperatures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Sources whose rows get one answer at each of these temperatures instead."""

    top_p: float = 1.0
    repetition_penalty: float | None = None
    """1 for none; left out, what the target's generation_config.json asks for."""

    max_tokens: int = 1024
    seed: int = 0
    keep_truncated: bool = True
    """Keep answers that ran into `max_tokens`."""

    raw: bool = False
    """Continue the user's text as it stands: for targets without a chat template."""

    concurrency: int = 32
    """Requests in flight."""

    cache_tokens: int = 0
    """Tokens of all requests together that the engine keeps; 0 for what the device can give."""

    retries: int = 8
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, temperatures in self._temperatures_by_setting.items():
            if not temperatures:
                raise ConfigError(f"{name} is empty; give at least one.")
            for temperature in temperatures:
                check_range("a temperature", temperature, 0, 5)
        check_range("top_p", self.top_p, 0.01, 1)
        check_penalty(self.repetition_penalty)
        for name in ("answers", "max_tokens", "concurrency"):
            check_range(name, getattr(self, name), 1)
        twice = [name for name, own in self.source_temperatures.items() if own.count(0) > 1]
        if twice:
            raise ConfigError(
                f"source_temperatures.{twice[0]} has 0 twice: the target would say the same again."
            )
        if self.answers > len(self.temperatures) and 0 in self.temperatures:
            raise ConfigError(
                f"answers is {self.answers} and temperatures has {len(self.temperatures)}, one of "
                "them 0: the target would say the same again. Ask for at most "
                f"{len(self.temperatures)} answers, or leave out the 0."
            )
        for name in ("retries", "cache_tokens"):
            check_range(name, getattr(self, name), 0)
        check_range("timeout_s", self.timeout_s, 1)

    @property
    def engine(self) -> EngineSettings:
        """Of an engine in this process, without what drafting needs."""
        return EngineSettings(max_requests=self.concurrency, cache_tokens=self.cache_tokens)

    @property
    def _temperatures_by_setting(self) -> dict[str, tuple[float, ...]]:
        named = {f"source_temperatures.{name}": t for name, t in self.source_temperatures.items()}
        return {"temperatures": self.temperatures, **named}

    def temperatures_of(self, source: str) -> tuple[float, ...]:
        """What answers to rows of a source are sampled at, one after the other."""
        return self.source_temperatures.get(source, self.temperatures)

    def answers_of(self, source: str) -> int:
        """Answers to each row of a source."""
        own = self.source_temperatures.get(source)
        return self.answers if own is None else len(own)
