"""How much a target has said, for whoever waits: rows that are asked together end together."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain

from fledge.contracts.outputs import Completion
from fledge.contracts.progress import Task
from fledge.contracts.sampling import SamplingParams
from fledge.engine.engine import Engine
from fledge.engine.sequence import Sequence as Answering

Question = tuple[list[int], SamplingParams]

_LOOK_EVERY_S = 1.0
_BATCHES_AT_ONCE = 2


class TokenMeter:
    """Shows the tokens of answers beside a task's label, before the first of them is finished."""

    def __init__(self, task: Task | None, label: str, *, every_s: float = _LOOK_EVERY_S) -> None:
        self._task, self._label, self._every_s = task, label, every_s
        self._num_ended = 0
        self._next_look = time.monotonic() + every_s

    def add_ended(self, seq: Answering) -> None:
        """This one will not be among those under way any more."""
        self._num_ended += len(seq.output_ids)

    def look(self, under_way: Iterable[Answering]) -> None:
        """Count, if it is time to."""
        if self._task is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._every_s
        said = self._num_ended + sum(len(seq.output_ids) for seq in under_way)
        self._task.update_label(f"{self._label}, {said:,} tokens")


def answer_batches(
    engine: Engine,
    batches: Iterable[Sequence[Question]],
    wants_more: Callable[[int], bool],
    said: TokenMeter,
) -> Generator[list[Completion]]:
    """Answers to batches of prompts in their order, with a look at the meter between cycles.

    The last answers of a batch would leave the engine to themselves, so that the next one is asked
    before, if `wants_more` says so of the prompts that are asked already.
    """
    source, under_way = iter(batches), deque[list[Answering]]()
    try:
        while True:
            while len(under_way) < _BATCHES_AT_ONCE and (
                not under_way or wants_more(sum(map(len, under_way)))
            ):
                if (batch := next(source, None)) is None:
                    break
                under_way.append([engine.add(engine.make_request(*one)) for one in batch])
            if not under_way:
                return
            _answer(engine, under_way[0], under_way, said)
            ended = under_way.popleft()
            for seq in ended:
                said.add_ended(seq)
            yield [seq.completion() for seq in ended]
    finally:
        for asked in under_way:
            engine.abort(asked)


def _answer(
    engine: Engine,
    asked: Sequence[Answering],
    under_way: Iterable[Sequence[Answering]],
    said: TokenMeter,
) -> None:
    """Go on until these have ended."""
    left = asked
    while left := [seq for seq in left if not seq.is_finished]:
        for seq in left:
            if seq.error is not None:
                raise seq.error
        engine.step()
        said.look(chain.from_iterable(under_way))
