"""Engines that take turns: plain decoding and one for each shape, beside one target and head."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fledge.contracts.tune_settings import TuneSettings
from fledge.engine.engine import Engine
from fledge.engine.timing import measure_pass_times
from fledge.lab.arms import CAPTURE_BUDGET_S, decode_options, engine_settings
from fledge.lab.measure import Clock, Measured, answer_questions
from fledge.lab.questions import Question
from fledge.lab.tune_shapes import Shape
from fledge.lab.visits import PLAIN, Visit
from fledge.models.head import Eagle3Head
from fledge.models.target import Target


class ShapeArms:
    """Engines by the names of their shapes, and what they measure."""

    def __init__(
        self,
        target: Target,
        head: Eagle3Head,
        shapes: Sequence[Shape],
        settings: TuneSettings,
        questions: Sequence[Question],
        *,
        target_name: str,
        clock: Clock,
    ) -> None:
        self._options, self._clock = decode_options(settings.measuring()), clock
        plain = engine_settings(settings.measuring(), questions)
        self._engines = {PLAIN: Engine(target, None, plain)}
        for shape in shapes:
            chosen = engine_settings(settings.measuring(shape.tree, shape.controller), questions)
            times = None
            if shape.controller == "adaptive":
                times = measure_pass_times(target, head, chosen, name=target_name)
            self._engines[shape.name] = Engine(target, head, chosen, times=times)
        for engine in self._engines.values():
            engine.capture_ahead(budget_s=CAPTURE_BUDGET_S)

    def measure(
        self, visit: Visit, concurrency: int, *, without: Mapping[str, str]
    ) -> dict[str, Measured]:
        """Every engine but those `without`, in the order of the visit."""
        names = [name for name in self._engines if name not in without]
        found = {name: self._answer(name, visit, concurrency) for name in visit.order(names)}
        return {name: found[name] for name in names}

    def _answer(self, name: str, visit: Visit, concurrency: int) -> Measured:
        return answer_questions(
            self._engines[name],
            visit.group.questions,
            replace(self._options, concurrency=concurrency),
            repeat=visit.repeat,
            clock=self._clock,
        )

    def close(self) -> None:
        """Let go of what the engines hold before others are made."""
        self._engines.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
