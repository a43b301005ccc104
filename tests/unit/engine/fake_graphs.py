"""Graphs on a device that is not here: what was captured is done again, into the same tensors."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from torch import Tensor

from fledge import Engine
from fledge.engine import graphs as graphs_module
from fledge.engine.graphs import Graphs


class Replayed:
    """Stands for a graph."""

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self._work, self._result = work, result

    def replay(self) -> None:
        write_over(self._result, self._work())


def write_over(old: Any, new: Any) -> None:
    """Have the tensors of one result hold what those of another do."""
    if isinstance(old, Tensor):
        if old is not new:
            old.copy_(new)
    elif is_dataclass(old):
        for field in fields(old):
            write_over(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, tuple):
        for one, other in zip(old, new, strict=True):
            write_over(one, other)
    elif isinstance(old, dict):
        for key in old.keys() & new.keys():
            write_over(old[key], new[key])


def capturing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Have the engine's cycles captured, after a fashion.

    Capturing does not do what it captures, so the first replay does: what work changes on its way
    is put back before.
    """
    steady = engine._cycle.ahead.steady
    graphs = steady._graphs

    def capture(work: Callable[[], Any]) -> Any:
        graphs._num_captured += 1
        batches = list(steady.places._batches.values())
        batches += [reading.batch for reading in steady._reader._readings.values()]
        before = [batch.state_XB.clone() for batch in batches]
        result = work()
        for batch, state_XB in zip(batches, before, strict=True):
            batch.state_XB.copy_(state_XB)
        graph: Any = Replayed(work, result)
        return graphs_module._Captured(graph, result, graphs._num_captured)

    monkeypatch.setattr(graphs, "is_capturing", True)
    monkeypatch.setattr(graphs, "_capture", capture)
    return graphs
