"""From answered turns to token ids with a loss mask: loss on what the target said, nothing else.

    token_ids  [the prompt, as a server encodes it | the answer]
    loss_mask  [0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 | 1 1 1 1 1 1]   1: the target said this token

A prompt is always encoded alone, since that is what a target is given. The answer's ids are the
sampled ones where they are known. Else they are what follows the prompt's ids when both are encoded
together; where a token would reach over the border, the answer is encoded alone as well.

Turns of one conversation share a sample when each saw exactly what is before it there, token for
token. Where a template strips or moves earlier text, they do not, and there are several samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fledge.contracts.conversation import Answer, Conversation
from fledge.data.loops import MIN_RUN, find_loop
from fledge.models.chat_spans import AnsweredTurn, UnclearTurn
from fledge.models.tokenizer import TargetTokenizer

_ANCHOR = "\n"
"""Tokenizers that put a space before a text do not put it after this."""


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """An answered turn as token ids."""

    message: int
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True, slots=True)
class MaskedSample:
    """A conversation, or a part of it, ready for training."""

    message: int
    """Index of the last message in it."""

    token_ids: list[int]
    loss_mask: list[bool]

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)

    def loop_end(self) -> int | None:
        """Where an answer has gone round in circles for some tokens; None where none does."""
        mask = np.asarray(self.loss_mask, dtype=np.int8)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            place = find_loop(self.token_ids[start:stop])
            if place is not None:
                return int(start) + place + MIN_RUN
        return None

    def cut(self, max_tokens: int) -> "MaskedSample":
        """At most so many tokens, from the beginning."""
        return MaskedSample(self.message, self.token_ids[:max_tokens], self.loss_mask[:max_tokens])


def answers_with_loss(row: Conversation, *, as_recorded: bool) -> dict[int, Answer | None]:
    """Messages that get loss: those the target wrote, or every one of an assistant."""
    written: dict[int, Answer | None] = {answer.message: answer for answer in row.answers}
    if not as_recorded:
        return written
    recorded = (i for i, message in enumerate(row.messages) if message.get("role") == "assistant")
    return {i: written.get(i) for i in recorded}


def encode_turns(
    tokenizer: TargetTokenizer, turns: Sequence[AnsweredTurn], *, is_raw: bool = False
) -> list[TokenTurn | UnclearTurn]:
    """Token ids of many turns, of any conversations; a turn that has none gives its error."""
    texts = [turn.prompt for turn in turns]
    texts += [turn.prompt + turn.answer for turn in turns if turn.token_ids is None]
    encoded = iter(tokenizer.encode_all(texts, adds_special_tokens=is_raw))
    prompts = [next(encoded) for _ in turns]
    found: list[TokenTurn | UnclearTurn] = []
    for turn, prompt_ids in zip(turns, prompts, strict=True):
        if turn.token_ids is not None:
            found.append(TokenTurn(turn.message, prompt_ids, list(turn.token_ids)))
            continue
        together = next(encoded)
        answer_ids: list[int] | None = together[len(prompt_ids) :]
        if together[: len(prompt_ids)] != prompt_ids:
            answer_ids = _encode_apart(tokenizer, prompt_ids, turn.answer, together)
        found.append(
            _no_border(turn)
            if answer_ids is None
            else TokenTurn(turn.message, prompt_ids, answer_ids)
        )
    return found


def _encode_apart(
    tokenizer: TargetTokenizer, prompt_ids: list[int], answer: str, together: list[int]
) -> list[int] | None:
    """Ids of an answer by itself that spell, behind the prompt, what both spell together."""
    wanted = tokenizer.decode(together, keeps_special_tokens=True)
    alone, anchored, anchor = tokenizer.encode_all([answer, _ANCHOR + answer, _ANCHOR])
    for answer_ids in (alone, anchored[len(anchor) :]):
        if tokenizer.decode(prompt_ids + answer_ids, keeps_special_tokens=True) == wanted:
            return answer_ids
    return None


def _no_border(turn: AnsweredTurn) -> UnclearTurn:
    return UnclearTurn(
        "no border between tokens at the beginning of the answer",
        f"message {turn.message}: the tokenizer joins {turn.prompt[-20:]!r} and "
        f"{turn.answer[:20]!r}, and they do not spell the same apart",
    )


def join_turns(turns: Sequence[TokenTurn]) -> list[MaskedSample]:
    """The fewest samples in which every turn has loss once, behind exactly what it saw."""
    samples: list[MaskedSample] = []
    waiting = sorted(turns, key=lambda turn: turn.message)
    while waiting:
        last = waiting[-1]
        token_ids = last.token_ids
        loss_mask = [False] * len(token_ids)
        left: list[TokenTurn] = []
        for turn in waiting:
            own_ids = turn.token_ids
            if token_ids[: len(own_ids)] != own_ids:
                left.append(turn)
                continue
            loss_mask[len(turn.prompt_ids) : len(own_ids)] = [True] * len(turn.answer_ids)
        samples.append(MaskedSample(last.message, token_ids, loss_mask))
        waiting = left
    return samples[::-1]
