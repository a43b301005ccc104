"""Questions asked of an engine, and what each answer cost.

    questions = make_questions(engine.target, suite.prompts, make_own_answers(plain, ...))
    measured = answer_questions(engine, questions, DecodeOptions(max_tokens=128, concurrency=8))
    measured.figures.accept_length, measured.figures.tokens_per_s

The loop is closed: `concurrency` requests are in flight until none is left. A request that fails
is an answer with an error; the others go on.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fledge.contracts.errors import RequestError
from fledge.data.loops import find_loop
from fledge.engine.engine import Engine
from fledge.engine.sequence import Sequence as Running
from fledge.lab.questions import DecodeOptions, Question

Clock = Callable[[Engine], float]
"""Seconds since some moment. Tests count passes instead, which no busy machine stretches."""


def wall_clock(engine: Engine) -> float:
    del engine
    return time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, or why there is none."""

    question: str
    task: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    cycles: int = 0
    seconds: float = 0.0
    """From its submission to its last token."""

    first_token_s: float = 0.0
    offered_at_depth: tuple[int, ...] = ()
    accepted_at_depth: tuple[int, ...] = ()
    num_copies_offered: int = 0
    num_copies_accepted: int = 0
    loop_start: int | None = None
    """Place of the first token that only repeats; what comes before it is counted below."""

    tokens_before_loop: int = 0
    cycles_before_loop: int = 0
    seconds_before_loop: float = 0.0
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Answer":
        lists = {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
        return cls(**{**table, **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What answers amount to, in the words of docs/glossary.md."""

    num_answers: int
    num_failed: int
    num_tokens: int
    num_cycles: int
    accept_length: float | None
    acceptance_at_depth: tuple[float | None, ...]
    seconds: float
    tokens_per_s: float | None
    num_looping: int
    """Answers with a looping span."""

    looping_share: float
    """Of the tokens, those from the cycle on that reaches their answer's first looping span."""

    accept_length_before_loops: float | None
    """Over the part of each answer before its first looping span."""

    num_copies_offered: int
    """Drafts that were copied from the text before, down to the first that was refused."""

    num_copies_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Answers that were made together."""

    answers: tuple[Answer, ...]
    """In the order of the questions."""

    seconds: float
    """From the first submission to the end of the last answer."""

    @property
    def figures(self) -> Figures:
        return summarise(self.answers, seconds=self.seconds)

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "answers": [one.to_json() for one in self.answers]}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Measured":
        answers = tuple(Answer.from_json(one) for one in table["answers"])
        return cls(answers=answers, seconds=table["seconds"])


def summarise(answers: Sequence[Answer], *, seconds: float) -> Figures:
    """Sums over answers; failed ones count as failed only."""
    good = [answer for answer in answers if answer.error is None]
    tokens, cycles = sum(one.num_tokens for one in good), sum(one.cycles for one in good)
    # The first token of an answer comes from reading the prompt.
    emitted = sum(one.num_tokens - 1 for one in good if one.cycles)
    early = sum(one.tokens_before_loop - 1 for one in good if one.cycles_before_loop)
    early_cycles = sum(one.cycles_before_loop for one in good)
    looping = sum(one.num_tokens - one.tokens_before_loop for one in good)
    return Figures(
        num_answers=len(good),
        num_failed=len(answers) - len(good),
        num_tokens=tokens,
        num_cycles=cycles,
        accept_length=emitted / cycles if cycles else None,
        acceptance_at_depth=_acceptance(good),
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds > 0 else None,
        num_looping=sum(one.loop_start is not None for one in good),
        looping_share=looping / tokens if tokens else 0.0,
        accept_length_before_loops=early / early_cycles if early_cycles else None,
        num_copies_offered=sum(one.num_copies_offered for one in good),
        num_copies_accepted=sum(one.num_copies_accepted for one in good),
    )


def _acceptance(answers: Sequence[Answer]) -> tuple[float | None, ...]:
    depth = max((len(one.offered_at_depth) for one in answers), default=0)
    offered, accepted = [0] * depth, [0] * depth
    for one in answers:
        pairs = zip(one.offered_at_depth, one.accepted_at_depth, strict=True)
        for i, (tried, taken) in enumerate(pairs):
            offered[i] += tried
            accepted[i] += taken
    pairs = zip(accepted, offered, strict=True)
    return tuple(taken / tried if tried else None for taken, tried in pairs)


def answer_questions(
    engine: Engine,
    questions: Sequence[Question],
    options: DecodeOptions,
    *,
    repeat: int = 0,
    clock: Clock = wall_clock,
) -> Measured:
    """Ask them in order, `options.concurrency` at a time."""
    waiting = deque(enumerate(questions))
    running: dict[int, _Watched] = {}
    answers: dict[int, Answer] = {}
    started = clock(engine)
    try:
        while waiting or running:
            while waiting and len(running) < options.concurrency:
                number, question = waiting.popleft()
                try:
                    request = engine.make_request(
                        question.token_ids, question.params(options, repeat=repeat)
                    )
                except RequestError as error:
                    answers[number] = _failed(question, str(error))
                    continue
                running[number] = _Watched(question, engine.add(request), clock(engine))
            if running:
                engine.step()
                now = clock(engine)
                for number in [one for one, watched in running.items() if watched.look(now)]:
                    answers[number] = running.pop(number).answer()
    finally:
        engine.abort([watched.seq for watched in running.values()])
    return Measured(
        answers=tuple(answers[number] for number in sorted(answers)),
        seconds=clock(engine) - started,
    )


class _Watched:
    """A request in flight, and how far it was after each pass."""

    def __init__(self, question: Question, seq: Running, now: float) -> None:
        self._question, self.seq, self._started = question, seq, now
        self._marks: list[tuple[int, int, float]] = []
        """Tokens, cycles and seconds whenever there were new tokens."""

    def look(self, now: float) -> bool:
        """Note how far it is; True when it has ended."""
        num_tokens = len(self.seq.output_ids)
        if num_tokens > (self._marks[-1][0] if self._marks else 0):
            self._marks.append((num_tokens, self.seq.cycles, now - self._started))
        return self.seq.has_ended

    def answer(self) -> Answer:
        seq = self.seq
        if seq.error is not None:
            return _failed(self._question, str(seq.error))
        loop_start = find_loop(seq.output_ids)
        end = len(seq.output_ids) if loop_start is None else loop_start
        before = [mark for mark in self._marks if mark[0] <= end]
        tokens, cycles, seconds = before[-1] if before else (0, 0, 0.0)
        return Answer(
            question=self._question.name,
            task=self._question.prompt.task,
            num_prompt_tokens=len(self._question.token_ids),
            token_ids=tuple(seq.output_ids),
            text=seq.text,
            cycles=seq.cycles,
            seconds=self._marks[-1][2],
            first_token_s=self._marks[0][2],
            offered_at_depth=seq.drafts.offered_at_depth,
            accepted_at_depth=seq.drafts.accepted_at_depth,
            num_copies_offered=seq.copies_offered,
            num_copies_accepted=seq.copies_accepted,
            loop_start=loop_start,
            tokens_before_loop=tokens,
            cycles_before_loop=cycles,
            seconds_before_loop=seconds,
        )


def _failed(question: Question, error: str) -> Answer:
    return Answer(
        question=question.name,
        task=question.prompt.task,
        num_prompt_tokens=len(question.token_ids),
        error=error,
    )
