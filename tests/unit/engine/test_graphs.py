"""What is kept of captured work; the capture itself is tested where there is a device for it.

Catches: kinds that are remembered for ever, graphs that are kept beyond their number or lost before
it, and a kind that is captured again although its graph is there.
"""

import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fledge.contracts.errors import CapacityError
from fledge.engine import graphs as graphs_module
from fledge.engine.graphs import Graphs


class Replayed:
    """Stands for a graph of a device that is not here."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs(torch.device("cpu"))

    def capture(work: Callable[[], Any]) -> Any:
        made._num_captured += 1
        graph: Any = Replayed(work)
        return graphs_module._Captured(graph, None, made._num_captured)

    monkeypatch.setattr(made, "is_capturing", True)
    monkeypatch.setattr(made, "_capture", capture)
    return made


def test_kinds_are_not_remembered_for_ever(graphs: Graphs) -> None:
    for kind in range(10_000):
        graphs.run(kind, int)
    assert len(graphs._seen) == graphs_module._MOST_SEEN
    assert not len(graphs)


def test_a_kind_is_run_then_captured_then_replayed(graphs: Graphs) -> None:
    runs: list[int] = []
    numbers = [graphs.run("kind", lambda: runs.append(1))[1] for _ in range(4)]
    assert numbers == [None, 1, 1, 1]
    assert len(runs) == 4
    assert graphs.num_cold == 2


def test_the_graph_not_used_for_longest_goes_first(graphs: Graphs) -> None:
    most = graphs_module._MOST_GRAPHS
    for kind in range(most):
        for _ in range(2):
            graphs.run(kind, int)
    graphs.run(0, int)
    for _ in range(2):
        graphs.run("one more", int)
    assert len(graphs) == most
    assert graphs.run(0, int)[1] == 1, "it was used after all others"
    cold = graphs.num_cold
    assert graphs.run(1, int)[1] == most + 2, "it is captured at once: it has run before"
    assert graphs.num_cold == cold + 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), CapacityError("no room")])
def test_what_there_is_no_memory_to_capture_is_done_all_the_same(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: Any, error: Exception
) -> None:
    def fail(work: Callable[[], Any]) -> Any:
        raise error

    monkeypatch.setattr(graphs, "_capture", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert [graphs.run("kind", lambda: 7) for _ in range(3)] == [(7, None)] * 3
    assert "cannot be captured here" in caplog.text
    assert "no room" in caplog.text


def test_streams_of_those_that_are_gone_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never one that somebody still captures on."""
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(graphs_module, "_idle_streams", defaultdict(list))
    first, second = (Graphs(torch.device("cpu")) for _ in range(2))
    streams = [first._own_stream(), second._own_stream()]
    assert streams[0] is not streams[1]
    del first
    gc.collect()
    third, fourth = (Graphs(torch.device("cpu")) for _ in range(2))
    assert third._own_stream() is streams[0]
    assert fourth._own_stream() not in streams
