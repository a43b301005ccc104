"""Chats and their masks, over the templates of the zoo."""

from typing import Any

from fledge.contracts.conversation import Answer, Message
from fledge.data.masks import (
    MaskedSample,
    TokenTurn,
    encode_turns,
    join_turns,
)
from fledge.models.chat_spans import TurnFinder, UnclearTurn
from fledge.models.tokenizer import TargetTokenizer
from tests.unit.data.template_zoo import (
    end_ids,
    make_fast_tokenizer,
    target_tokenizer,
    turn_finder,
)

U, A = "user", "assistant"


def say(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def sampled(message: int, finish: Any = "stop", token_ids: list[int] | None = None) -> Answer:
    return Answer(
        message=message,
        model="m",
        temperature=0.0,
        seed=0,
        finish_reason=finish,
        token_ids=None if token_ids is None else tuple(token_ids),
    )


def samples_of(
    name: str,
    messages: list[Message],
    answers: dict[int, Answer | None] | None = None,
    finder: TurnFinder | None = None,
) -> list[MaskedSample]:
    if answers is None:
        answers = {i: None for i, message in enumerate(messages) if message["role"] == A}
    turns = (finder or turn_finder(name)).find(messages, [], answers)
    encoded = encode_turns(target_tokenizer(name), turns)
    errors = [turn for turn in encoded if isinstance(turn, UnclearTurn)]
    if errors:
        raise errors[0]
    return join_turns([turn for turn in encoded if isinstance(turn, TokenTurn)])


def finder_of(template: str, name: str = "chatml") -> TurnFinder:
    """A finder for another template over a family's tokens."""
    return TurnFinder(TargetTokenizer(make_fast_tokenizer(name, template)), end_ids(name))


CHAT = [say(U, "Hi"), say(A, "Hello!")]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HEAD = "<|im_start|>system\nYou are Eyas.<|im_end|>\n"
