"""Settings of `fledge bench`: how much load, of which prompts, and what counts as good."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from fledge.contracts.data_settings import check_penalty
from fledge.contracts.errors import ConfigError

Arrivals = Literal["poisson", "constant"]
Api = Literal["chat", "completions"]

SLO_FIGURES = ("ttft", "tpot", "itl", "e2e")
"""What a service level may limit: see docs/bench.md."""

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What `fledge bench` sends, and how often."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Closed loop: so many users, each of whom asks again when answered."""

    rates: tuple[float, ...] = ()
    """Open loop: requests per second that come whether or not earlier ones are answered."""

    arrivals: Arrivals = "poisson"
    """When requests of the open loop come: by chance, or evenly."""

    prompts: str = "builtin"
    """A suite by name, or a JSONL file."""

    prompt_len: int = 0
    """Words of made-up prompts, all of this length; 0 takes the suite's."""

    shared_prefix_len: int = 0
    """Words that all made-up prompts begin with."""

    max_tokens: int = 128
    """Longest answer."""

    temperature: float = 0.0
    repetition_penalty: float | None = None
    """1 for none; left out, what the server or the target does by itself."""

    ignore_eos: bool = False
    """Have every answer go on to `max_tokens`; not every server can."""

    requests: int = 32
    """Requests of each measurement, at least."""

    waves: int = 4
    """And at least so many for each user of the closed loop."""

    repeats: int = 3
    """Times that everything is measured; intervals of confidence come from these."""

    warm_up: bool = True
    """Send one short request for each user before a measurement, and forget it."""

    api: Api = "chat"
    """Which route is asked."""

    timeout_s: float = 600.0
    """Seconds that one answer may take."""

    seed: int = 0
    """Of arrivals and made-up prompts."""

    slo: dict[str, str] = field(default_factory=dict)
    """A service level, as { ttft = "500ms", tpot = "30ms" }: only answers within it are good."""

    gpu_prices: dict[str, float] = field(default_factory=dict)
    """Prices of one hour of a GPU, by any name, as { H200 = 3.5 }."""

    gpus: int = 1
    """GPUs that the server runs on."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "requests", "waves", "repeats", "gpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("prompt_len", "shared_prefix_len", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or positive.")
        if self.shared_prefix_len and self.shared_prefix_len >= self.prompt_len:
            raise ConfigError(
                f"shared_prefix_len is {self.shared_prefix_len} and prompt_len is "
                f"{self.prompt_len}; a shared prefix must be shorter than the prompts."
            )
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 or positive.")
        check_penalty(self.repetition_penalty)
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be positive.")
        self._check_load()
        self.limits_s  # noqa: B018  (what cannot be read is said at once)
        for name, price in self.gpu_prices.items():
            if not 0 < price < math.inf:
                raise ConfigError(f"the price of {name} is {price}; it must be positive.")

    def _check_load(self) -> None:
        if not self.concurrency and not self.rates:
            raise ConfigError("there is no load: give concurrency, rates, or both.")
        for level in self.concurrency:
            if not 1 <= level <= 4096:
                raise ConfigError(f"concurrency has {level}; it must be between 1 and 4096.")
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"rates has {rate}; it must be positive.")
        for name in ("concurrency", "rates"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ConfigError(f"{name} names the same load twice: {getattr(self, name)}.")

    @property
    def limits_s(self) -> dict[str, float]:
        """The service level in seconds."""
        return {name: _limit_s(name, text) for name, text in self.slo.items()}


def parse_slo(typed: str) -> dict[str, str]:
    """`ttft=500ms,tpot=30ms` as a table."""
    table: dict[str, str] = {}
    for entry in typed.split(","):
        name, equals, limit = (part.strip() for part in entry.partition("="))
        if not equals or name in table:
            raise ConfigError(f"--slo {typed!r} is not of the form ttft=500ms,tpot=30ms.")
        table[name] = limit
    return table


def _limit_s(name: str, text: str) -> float:
    if name not in SLO_FIGURES:
        known = ", ".join(SLO_FIGURES)
        raise ConfigError(f"a service level cannot limit {name!r}; it may limit {known}.")
    match = _TIME.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"the limit of {name} is {text!r}; it must be like 500ms or 0.5s.")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
