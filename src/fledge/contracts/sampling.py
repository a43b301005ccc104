"""How the next token is chosen, as a request states it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fledge.contracts.errors import ConfigError
from fledge.contracts.grammar import Grammar

_MAX_SEED = _MAX_TOP_K = 2**63
MAX_LOGPROBS = 20

LogitBias = Mapping[int, float] | tuple[tuple[int, float], ...]
"""Token ids with what is added to their logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; the defaults are the target's greedy answer.

    What changes the logits does so in transformers' order: bias, repetition, presence and
    frequency, minimum of tokens; then come temperature, top-k, top-p and min-p.
    """

    max_tokens: int = 256
    """Most tokens to generate; the context length may end the answer earlier."""

    min_tokens: int = 0
    """Before this many tokens no end-of-text token and none of `stop_token_ids` is chosen, and stop
    texts are text like any other."""

    temperature: float = 0.0
    """0 takes the most probable token; above 0 divides the logits before sampling."""

    top_k: int = 0
    """Sample among the k most probable tokens only; 0 means all."""

    top_p: float = 1.0
    """Sample among the smallest set of tokens that holds this much probability."""

    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""

    logit_bias: LogitBias = ()
    """Added to the logits of the given token ids. A mapping or pairs; kept as pairs in the order of
    their ids."""

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

    grammar: Grammar | None = None
    """What the answer must look like; it ends where the grammar allows nothing more."""

    shown_token_ids: tuple[int, ...] = ()
    """Special tokens that are written into the text, such as the marks of tool calls; all others
    have none."""

    logprobs: int | None = None
    """Give the logprob of each token, and this many of the most probable tokens with theirs: those
    of the target itself, before everything above. None gives nothing."""

    speculate: bool = True
    """Let the head draft for this request. Without it the text is the same, at another speed."""

    draft_depths: bool = False
    """Tell of each token how it came: at which depth it was drafted, or that it was not."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if not 0 <= self.seed < _MAX_SEED:
            raise ConfigError(f"seed is {self.seed}; it must be between 0 and 2**63 - 1.")
        if any(not text for text in self.stop):
            raise ConfigError("a stop text is empty; it would end every answer at once.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(
                f"logprobs is {self.logprobs}; it must be between 0 and {MAX_LOGPROBS}."
            )

    def _check_types(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed"):
            _check_whole(name, getattr(self, name))
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name))
        if self.repetition_penalty is not None:
            _check_number("repetition_penalty", self.repetition_penalty)
        stop: object = self.stop
        if isinstance(stop, str):
            raise ConfigError(f"stop is the text {stop!r}; it must be a tuple of texts.")
        for token_id in self.stop_token_ids:
            _check_whole("a stop token id", token_id)
        for token_id in self.shown_token_ids:
            _check_whole("a shown token id", token_id)

    def _check_lengths(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if self.min_tokens < 0:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be 0 (none) or positive.")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}; "
                "lower the first or raise the second."
            )

    def _check_filters(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number."
            )
        if not 0 <= self.top_k < _MAX_TOP_K:
            raise ConfigError(
                f"top_k is {self.top_k}; it must be 0 (all tokens), or positive and below 2**63."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be between 0 and 1.")

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        if penalty is not None and not (math.isfinite(penalty) and penalty > 0):
            raise ConfigError(
                f"repetition_penalty is {penalty}; it must be a positive number, 1 for none."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number.")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}; it must be a number.")


def _checked_bias(bias: LogitBias) -> tuple[tuple[int, float], ...]:
    """The pairs in the order of their ids, once they are known to be token ids and numbers."""
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    checked: dict[int, float] = {}
    try:
        for token_id, value in pairs:
            _check_whole("a token id of logit_bias", token_id)
            _check_number(f"logit_bias of token {token_id}", value)
            if not math.isfinite(value):
                raise ConfigError(f"logit_bias of token {token_id} is {value}; it must be finite.")
            if token_id in checked:
                raise ConfigError(f"logit_bias names token {token_id} twice; name it once.")
            checked[token_id] = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"logit_bias is {bias!r}; it must map token ids to numbers, as in {{13: -5.0}}."
        ) from error
    return tuple(sorted(checked.items()))
