"""Engines that take turns: plain decoding and one for each head, beside one loaded target.

Each has memory for its few requests only, and keeps no prefixes: a question costs the same the
second time.
"""

import gc
from collections.abc import Mapping, Sequence

import torch

from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import EngineSettings
from fledge.engine.engine import Engine
from fledge.engine.timing import measure_pass_times
from fledge.lab.measure import Clock, Measured, answer_questions
from fledge.lab.questions import DecodeOptions, Question
from fledge.lab.visits import PLAIN, Visit
from fledge.models.head import Eagle3Head
from fledge.models.target import Target


def engine_settings(settings: SelectSettings, questions: Sequence[Question]) -> EngineSettings:
    """Memory for `concurrency` requests with the longest of these questions."""
    longest = max(len(question.token_ids) for question in questions)
    block_size = EngineSettings().block_size
    # A block more than a request can fill: drafts begin wherever the last block ends.
    needed = longest + settings.max_tokens + settings.tree.num_scratch
    cache_tokens = settings.concurrency * (-(-needed // block_size) + 1) * block_size
    return EngineSettings(
        tree=settings.tree,
        controller=settings.controller,
        copies=settings.copies,
        max_requests=settings.concurrency,
        max_pass_tokens=max(EngineSettings().max_pass_tokens, settings.concurrency),
        cache_tokens=cache_tokens,
        share_prefixes=False,
    )


CAPTURE_BUDGET_S = 15.0
"""For each engine, so that none is measured while it captures cycles."""


def decode_options(settings: SelectSettings) -> DecodeOptions:
    return DecodeOptions(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        repetition_penalty=settings.repetition_penalty,
        seed=settings.seed,
        concurrency=settings.concurrency,
    )


class Arms:
    """Engines by name, and what they measure."""

    def __init__(
        self,
        target: Target,
        heads: Mapping[str, Eagle3Head],
        settings: SelectSettings,
        questions: Sequence[Question],
        *,
        target_name: str,
        clock: Clock,
    ) -> None:
        self._options, self._clock = decode_options(settings), clock
        chosen = engine_settings(settings, questions)
        self._engines = {PLAIN: Engine(target, None, chosen)}
        for name, head in heads.items():
            times = None
            if settings.controller == "adaptive":
                times = measure_pass_times(target, head, chosen, name=target_name)
            self._engines[name] = Engine(target, head, chosen, times=times)
        for engine in self._engines.values():
            engine.capture_ahead(budget_s=CAPTURE_BUDGET_S)

    def measure(self, visit: Visit) -> dict[str, Measured]:
        """Every engine that is left, in the order of the visit."""
        order = visit.order(list(self._engines))
        found = {name: self._answer(name, visit) for name in order}
        return {name: found[name] for name in self._engines}

    def _answer(self, name: str, visit: Visit) -> Measured:
        return answer_questions(
            self._engines[name],
            visit.group.questions,
            self._options,
            repeat=visit.repeat,
            clock=self._clock,
        )

    def keep(self, heads: Sequence[str]) -> None:
        """Let go of the other heads and of what they hold."""
        self._engines = {
            name: engine for name, engine in self._engines.items() if name in (PLAIN, *heads)
        }
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
