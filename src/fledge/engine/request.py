"""What a user asks, checked and turned into token ids before anything runs."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import cast

from fledge.contracts.conversation import Message
from fledge.contracts.errors import RequestError
from fledge.contracts.sampling import SamplingParams
from fledge.models.target import Target

Prompt = str | Many[int] | Many[Message]
"""A text (put through the chat template, if there is one), a conversation, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that was checked and may run."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    """`params.max_tokens`, or less where the context ends."""

    eos_token_ids: frozenset[int]


class RequestMaker:
    """Turns prompts into requests for one target."""

    def __init__(self, target: Target, capacity: int | None = None) -> None:
        """`capacity` is how many tokens the cache memory holds, None for any number."""
        self._target = target
        self._capacity = capacity

    def make_all(
        self, prompts: Many[Prompt], params: SamplingParams | Many[SamplingParams] | None
    ) -> list[Request]:
        """One request per prompt; parameters are given once for all, or once for each."""
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise RequestError(
                "generate takes a list of prompts, and this is one prompt; put it in a list."
            )
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts and {len(params)} sets of sampling parameters; "
                "give one for all or one for each."
            )
        return [self.make(*pair) for pair in zip(prompts, params, strict=True)]

    def make(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Check one prompt and turn it into token ids."""
        target = self._target
        token_ids = self._encode(prompt)
        self._check(token_ids)
        if params.stop and target.tokenizer is None:
            raise RequestError("stop texts need a tokenizer, and this target was built without.")
        if params.repetition_penalty is None:
            params = replace(params, repetition_penalty=target.repetition_penalty)
        eos = frozenset() if params.ignore_eos else target.eos_token_ids
        eos |= frozenset(params.stop_token_ids)
        self._check_params(params, eos)
        max_new_tokens = min(params.max_tokens, target.context_len - len(token_ids))
        self._check_fits(len(token_ids), max_new_tokens)
        return Request(
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos,
        )

    def _check(self, token_ids: list[int]) -> None:
        context_len = self._target.context_len
        if not token_ids:
            raise RequestError("the prompt is empty: it has no tokens to continue from.")
        if len(token_ids) >= context_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and the target's context holds "
                f"{context_len}, the answer included; shorten the prompt."
            )
        self._check_known("the prompt holds", token_ids)

    def _check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        # The last token is never read, so it needs no memory.
        needed = prompt_len + max_new_tokens - 1
        if self._capacity is not None and needed > self._capacity:
            raise RequestError(
                f"the request may need {needed} tokens of cache memory ({prompt_len} of the prompt "
                f"and up to {max_new_tokens} of the answer) and the engine has {self._capacity}; "
                "shorten the prompt, lower max_tokens, or give the engine more (cache_tokens)."
            )

    def _check_params(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self._check_known("stop_token_ids holds", params.stop_token_ids)
        self._check_known("logit_bias names", dict(params.logit_bias))
        vocab_size = self._target.vocab_size
        num_ends = sum(token_id < vocab_size for token_id in eos_token_ids)
        if params.min_tokens and num_ends >= vocab_size:
            raise RequestError(
                f"all {vocab_size} tokens of the vocabulary end the answer, and min_tokens is "
                f"{params.min_tokens}; name fewer stop_token_ids."
            )

    def _check_known(self, where: str, token_ids: Iterable[int]) -> None:
        vocab_size = self._target.vocab_size
        strange = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"{where} token id {strange}; the target's vocabulary has ids 0 to "
                f"{vocab_size - 1}."
            )

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return list(cast(Many[int], prompt))
        tokenizer = self._target.tokenizer
        if tokenizer is None:
            raise RequestError("this target was built without a tokenizer; give token ids.")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise RequestError("the prompt is empty.")
            return tokenizer.encode_prompt(prompt)
        if not tokenizer.has_chat_template:
            raise RequestError(
                "this target has no chat template, so it cannot read a conversation; "
                "give the prompt as one text."
            )
        return tokenizer.encode_chat(cast(Many[Message], prompt))
