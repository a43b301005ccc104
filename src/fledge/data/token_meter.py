"""How much a target has said, for whoever waits: rows that are asked together end together."""

import time
from collections.abc import Iterable, Sequence

from fledge.contracts.outputs import Completion
from fledge.contracts.progress import Task
from fledge.contracts.sampling import SamplingParams
from fledge.engine.engine import Engine
from fledge.engine.sequence import Sequence as Answering

_LOOK_EVERY_S = 1.0


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


def answer_watched(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    said: TokenMeter,
) -> list[Completion]:
    """Answers to several prompts in their order, with a look at the meter between cycles."""
    asked = [engine.add(engine.make_request(*pair)) for pair in zip(prompts, params, strict=True)]
    try:
        while not all(seq.is_finished for seq in asked):
            for seq in asked:
                if seq.error is not None:
                    raise seq.error
            engine.step()
            said.look(asked)
    finally:
        engine.abort(asked)
    for seq in asked:
        said.add_ended(seq)
    return [seq.completion() for seq in asked]
