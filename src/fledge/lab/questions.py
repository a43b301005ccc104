"""Prompts as requests: token ids that are the same for every head and every run.

The second turn of a conversation continues what the target itself said before. So that all heads
are asked the same, these answers are made once, without a head, and kept.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fledge.contracts.errors import MeasurementError, RequestError
from fledge.contracts.sampling import SamplingParams
from fledge.engine.engine import Engine
from fledge.lab.suite_prompts import Prompt
from fledge.models.target import Target

_TOGETHER = 16
"""Conversations that are answered at once, before they are kept."""

OwnAnswers = Mapping[str, Sequence[str]]
"""What the target said to the turns before the last, by the prompt's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How questions are answered while they are measured."""

    max_tokens: int = 256
    temperature: float = 0.0
    repetition_penalty: float | None = None
    """None takes what the target asks for."""

    seed: int = 0
    concurrency: int = 1
    """Requests in flight: as soon as one ends, the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One turn of a prompt, with the conversation before it."""

    prompt: Prompt
    turn: int
    token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """Different from all others of a suite: `math/math-3`, `mt-bench/81#2`."""
        return question_name(self.prompt, self.turn)

    @property
    def is_last(self) -> bool:
        """Whether this is the answer that can be checked."""
        return self.turn == len(self.prompt.turns) - 1

    def params(self, options: DecodeOptions, *, repeat: int = 0) -> SamplingParams:
        """Sampled answers differ between questions and repeats, and never between heads."""
        seed = options.seed
        if options.temperature > 0:
            digest = hashlib.sha256(f"{seed} {self.name} {repeat}".encode()).digest()
            seed = int.from_bytes(digest[:7])
        return SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            repetition_penalty=options.repetition_penalty,
            seed=seed,
        )


def prompt_name(prompt: Prompt) -> str:
    return f"{prompt.task}/{prompt.id}"


def question_name(prompt: Prompt, turn: int) -> str:
    return prompt_name(prompt) + (f"#{turn + 1}" if len(prompt.turns) > 1 else "")


def encode_turn(target: Target, prompt: Prompt, answers: Sequence[str] = ()) -> tuple[int, ...]:
    """Token ids of the turn after these answers, always through the chat template if there is one.

    A base model without a template continues the plain text.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise RequestError("this target was built without a tokenizer, so no suite can be asked.")
    if not tokenizer.has_chat_template:
        return tuple(tokenizer.encode(prompt.continuation(answers)))
    return tuple(tokenizer.encode_chat(prompt.messages(answers)))


def make_own_answers(
    engine: Engine,
    prompts: Iterable[Prompt],
    options: DecodeOptions,
    *,
    known: OwnAnswers | None = None,
    keep: Callable[[str, list[str]], None] = lambda name, answers: None,
) -> dict[str, Sequence[str]]:
    """Answers to all turns before the last; those `known` are not made again.

    `keep` is told of each conversation when it is complete. One that outgrows the target's context
    has none.
    """
    found = dict(known or {})
    missing = [one for one in prompts if len(one.turns) > 1 and prompt_name(one) not in found]
    for start in range(0, len(missing), _TOGETHER):
        for name, answers in _converse(engine, missing[start : start + _TOGETHER], options).items():
            found[name] = answers
            keep(name, answers)
    return found


def _converse(
    engine: Engine, prompts: Sequence[Prompt], options: DecodeOptions
) -> dict[str, list[str]]:
    """Several conversations at once, turn by turn, up to their last turn."""
    answers: dict[str, list[str]] = {prompt_name(prompt): [] for prompt in prompts}
    room = engine.target.context_len - options.max_tokens
    for turn in range(max(len(prompt.turns) for prompt in prompts) - 1):
        questions = []
        for prompt in prompts:
            name = prompt_name(prompt)
            if turn >= len(prompt.turns) - 1 or name not in answers:
                continue
            token_ids = encode_turn(engine.target, prompt, answers[name])
            if len(token_ids) > room:
                del answers[name]
            else:
                questions.append(Question(prompt=prompt, turn=turn, token_ids=token_ids))
        params = [question.params(options) for question in questions]
        completions = engine.generate([one.token_ids for one in questions], params)
        for question, completion in zip(questions, completions, strict=True):
            answers[prompt_name(question.prompt)].append(completion.text)
    return answers


def make_questions(
    target: Target, prompts: Iterable[Prompt], own_answers: OwnAnswers
) -> tuple[Question, ...]:
    """Every turn of every prompt."""
    return tuple(
        Question(
            prompt=prompt,
            turn=turn,
            token_ids=encode_turn(
                target, prompt, own_answers[prompt_name(prompt)][:turn] if turn else ()
            ),
        )
        for prompt in prompts
        for turn in range(len(prompt.turns))
    )


def refuse_long(
    questions: Sequence[Question], *, context_len: int, max_tokens: int
) -> tuple[tuple[Question, ...], int]:
    """Those that leave room for a whole answer, and how many do not."""
    fitting = tuple(one for one in questions if len(one.token_ids) + max_tokens <= context_len)
    if not fitting:
        shortest = min((len(one.token_ids) for one in questions), default=0)
        raise MeasurementError(
            f"no prompt fits: the shortest has {shortest} tokens, answers may have {max_tokens}, "
            f"and the target's context holds {context_len}; lower max_tokens, or take other "
            "prompts."
        )
    return fitting, len(questions) - len(fitting)
