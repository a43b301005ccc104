"""How the next token is chosen, as a request states it."""

import math
from dataclasses import dataclass

from fledge.contracts.errors import ConfigError

_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; the defaults are the target's greedy answer."""

    max_tokens: int = 256
    """Most tokens to generate; the context length may end the answer earlier."""

    temperature: float = 0.0
    """0 takes the most probable token; above 0 divides the logits before sampling."""

    top_k: int = 0
    """Sample among the k most probable tokens only; 0 means all."""

    top_p: float = 1.0
    """Sample among the smallest set of tokens that holds this much probability."""

    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""

    repetition_penalty: float | None = None
    """Divides the logits of tokens already in the prompt or the answer; 1 does nothing. None takes
    what the target's generation_config.json asks for, as transformers does."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the answer."""

    frequency_penalty: float = 0.0
    """Subtracted from the logits of a token once for each time it is in the answer."""

    seed: int = 0
    """Same seed, same prompt, same parameters: same text, with or without a head."""

    stop: tuple[str, ...] = ()
    """Texts that end the answer; neither they nor what follows is part of it."""

    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the answer, beside the target's own end-of-text ids."""

    ignore_eos: bool = False
    """Go on past the target's end-of-text token (for measuring)."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number.")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} is {value!r}; it must be a number.")
        stop: object = self.stop
        if isinstance(stop, str):
            raise ConfigError(f"stop is the text {stop!r}; it must be a tuple of texts.")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number."
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (all tokens) or positive.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be between 0 and 1.")
        penalty = self.repetition_penalty
        if penalty is not None and not (math.isfinite(penalty) and penalty > 0):
            raise ConfigError(
                f"repetition_penalty is {penalty}; it must be a positive number, 1 for none."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number.")
        if not 0 <= self.seed < _MAX_SEED:
            raise ConfigError(f"seed is {self.seed}; it must be between 0 and 2**63 - 1.")
        if any(not text for text in self.stop):
            raise ConfigError("a stop text is empty; it would end every answer at once.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0
