"""From visits to speed-ups, and which of two heads is faster.

A unit of the statistics is a group with all its repeats; where a task has only one group, its
repeats are the units, and the interval knows about times but not about other prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fledge.lab.measure import Measured
from fledge.lab.statistics import (
    Array,
    Interval,
    Statistic,
    bootstrap,
    rate_ratio,
    rate_ratio_difference,
)
from fledge.lab.visit_records import VisitRecord

Columns = Callable[[VisitRecord], Sequence[float] | None]
"""What a visit adds to its unit; None leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One head's mean speed-up over tasks; None where nothing could be measured."""

    head: str
    speed_up: Interval | None

    @property
    def key(self) -> float:
        return self.speed_up.value if self.speed_up is not None else float("-inf")


def rank_heads(records: Sequence[VisitRecord], heads: Sequence[str], *, seed: int) -> list[Ranked]:
    """Fastest first; equal ones stay in their order."""
    found = [Ranked(head=head, speed_up=speed_up(records, head, seed=seed)) for head in heads]
    return sorted(found, key=lambda one: -one.key)


def speed_up(
    records: Sequence[VisitRecord], head: str, *, seed: int, before_loops: bool = False
) -> Interval | None:
    """Tokens/s with the head over tokens/s without, averaged over the tasks in the records."""

    def columns(record: VisitRecord) -> Sequence[float] | None:
        return _rates(record, head, before_loops=before_loops)

    return _figure(records, columns, rate_ratio, seed=seed)


def difference(
    records: Sequence[VisitRecord], head: str, other: str, *, seed: int
) -> Interval | None:
    """One head's speed-up less another's, over the visits that both made."""

    def columns(record: VisitRecord) -> Sequence[float] | None:
        own, others = _rates(record, head), _rates(record, other)
        return None if own is None or others is None else [*own, *others]

    return _figure(records, columns, rate_ratio_difference, seed=seed)


def accept_length(records: Sequence[VisitRecord], head: str, *, seed: int) -> Interval | None:
    """Tokens of decode cycles over cycles, averaged over the tasks in the records."""

    def columns(record: VisitRecord) -> Sequence[float] | None:
        if head not in record.arms:
            return None
        good = [one for one in record.arms[head].answers if one.cycles]
        emitted, cycles = sum(one.num_tokens - 1 for one in good), sum(one.cycles for one in good)
        return [emitted, cycles] if cycles else None

    return _figure(records, columns, lambda sums_RC: sums_RC[:, 0] / sums_RC[:, 1], seed=seed)


def is_distinguishable(found: Interval | None) -> bool:
    """Whether a difference is surely not 0."""
    return found is not None and found.excludes(0.0)


def _rates(record: VisitRecord, head: str, *, before_loops: bool = False) -> Sequence[float] | None:
    if head not in record.arms:
        return None
    amounts = _before_loops if before_loops else _whole
    own, plain = amounts(record.arms[head]), amounts(record.plain)
    return [*own, *plain] if min(*own, *plain) > 0 else None


def _whole(measured: Measured) -> tuple[float, float]:
    return measured.num_tokens, measured.seconds


def _before_loops(measured: Measured) -> tuple[float, float]:
    """Of answers made one at a time: only then the seconds of an answer are its own."""
    tokens = sum(one.tokens_before_loop for one in measured.answers)
    return tokens, sum(one.seconds_before_loop for one in measured.answers)


def _figure(
    records: Sequence[VisitRecord], columns: Columns, statistic: Statistic, *, seed: int
) -> Interval | None:
    strata = _strata(records, columns)
    return bootstrap(strata, statistic, seed=seed) if strata else None


def _strata(records: Sequence[VisitRecord], columns: Columns) -> list[Array]:
    """Units by columns, for each task."""
    tasks: dict[str, dict[int, list[Array]]] = {}
    for record in records:
        found = columns(record)
        if found is not None:
            groups = tasks.setdefault(record.task, {})
            groups.setdefault(record.group, []).append(np.array(found, dtype=float))
    return [
        np.stack(
            next(iter(groups.values()))
            if len(groups) == 1
            else [np.sum(visits, axis=0) for visits in groups.values()]
        )
        for groups in tasks.values()
    ]
