"""From the parameters of a request to those of the engine."""

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ConfigError
from fledge.contracts.sampling import SamplingParams
from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_requests import ChatRequest, CompletionRequest

_log = logging.getLogger(__name__)

_NUM_SEEDS = 2**63
_COLDEST = 1e-5
_DEFAULT_COMPLETION_TOKENS = 16
"""As in OpenAI's API; a chat goes on to the end of the context."""

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one prompt of a server may ask for."""

    max_tokens: int
    """Prompt and answer together."""

    max_prompt_tokens: int = 0
    max_answer_tokens: int = 0
    """0 is no limit of its own."""

    defaults: Mapping[str, float] = field(default_factory=dict)
    """What the target's makers recommend for sampling."""

    def check_prompt(self, num_tokens: int) -> None:
        limit = self.max_tokens - 1
        if self.max_prompt_tokens:
            limit = min(limit, self.max_prompt_tokens)
        if num_tokens > limit:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens and this server takes at most {limit} with "
                f"room for an answer; shorten it.",
                code="context_length_exceeded",
            )

    def answer_tokens(self, asked: int | None, default: int | None, num_prompt: int) -> int:
        """Longest answer to a prompt of this length."""
        room = self.max_tokens - num_prompt
        limit = self.max_answer_tokens
        if asked is None:
            wanted = room if default is None else default
            return min(wanted, limit or wanted, room)
        if limit and asked > limit:
            raise InvalidRequestError(
                f"max_tokens is {asked} and this server allows at most {limit}.",
                param="max_tokens",
            )
        return min(asked, room)


def model_defaults(target_dir: Path) -> dict[str, float]:
    """Sampling settings that a target's generation_config.json recommends."""
    try:
        document: Any = json.loads((target_dir / "generation_config.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("generation_config.json of the target cannot be read: %s", error)
        return {}
    found = {
        name: document[name]
        for name in _MODEL_DEFAULTS
        if isinstance(document.get(name), int | float)
    }
    try:
        SamplingParams(**found)
    except ConfigError as error:
        _log.warning("generation_config.json of the target is not followed: %s", error)
        return {}
    return found


def params_of(
    request: ChatRequest | CompletionRequest, allowance: Allowance, num_prompt: int
) -> list[SamplingParams]:
    """Parameters of each of the `n` answers to a prompt; they differ in their seeds."""
    if isinstance(request, ChatRequest):
        asked = request.max_completion_tokens or request.max_tokens
        default, logprobs = None, (request.top_logprobs or 0) if request.logprobs else None
    else:
        asked, default = request.max_tokens, _DEFAULT_COMPLETION_TOKENS
        logprobs = request.logprobs
    max_tokens = allowance.answer_tokens(asked, default, num_prompt)
    recommended = allowance.defaults
    try:
        first = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens or 0, max_tokens),
            temperature=_temperature(request.temperature, recommended.get("temperature")),
            top_k=max(0, int(_first(request.top_k, recommended.get("top_k"), 0))),
            top_p=_first(request.top_p, recommended.get("top_p"), 1.0),
            min_p=_first(request.min_p, recommended.get("min_p"), 0.0),
            logit_bias=_logit_bias(request.logit_bias),
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            seed=_seed(request.seed),
            stop=request.stops,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            speculate=request.speculation is not False,
            draft_depths=bool(request.return_draft_depths),
        )
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from error
    return [
        replace(first, seed=(first.seed + number) % _NUM_SEEDS)
        for number in range(request.num_choices)
    ]


def _temperature(asked: float | None, recommended: float | None) -> float:
    temperature = _first(asked, recommended, 1.0)
    # Logits divided by less are no numbers any more, and what they tend to is greedy.
    return temperature if temperature >= _COLDEST else 0.0


def _seed(asked: int | None) -> int:
    return secrets.randbelow(_NUM_SEEDS) if asked is None else asked % _NUM_SEEDS


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    found: dict[int, float] = {}
    for token_id, value in (bias or {}).items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise InvalidRequestError(
                f"logit_bias names {token_id!r}; its names must be token ids.", param="logit_bias"
            )
        if not -100 <= value <= 100:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is {value}; it must be between -100 and 100.",
                param="logit_bias",
            )
        found[int(token_id)] = value
    return found
