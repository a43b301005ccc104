"""Idle time of a device is counted once, and put to the account of what caused it.

Catches: overlapping work counted twice, the wait between two graphs of one cycle blamed on the
host, and copies between cycles taken for idle time.
"""

from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import profile_cycles

    module: ModuleType = profile_cycles
    return module


def test_gaps_by_their_kind(tool: ModuleType) -> None:
    def graph(begin: int, launch: int) -> list[object]:
        """Three kernels of 10, a gap of 1 between them; the second two overlap."""
        spans = [(0, 10), (11, 21), (15, 30)]
        return [tool.Work(begin + a, begin + b, launch, "k") for a, b in spans]

    works = [
        *graph(0, 1),  # draft until 30
        *graph(34, 2),  # verify until 64, 4 later
        tool.Work(70, 75, 3, "Memcpy DtoH (Device -> Pinned)"),  # 6 later
        *graph(77, 4),  # the next cycle's draft until 107, 2 later
    ]
    found = tool.analyse(works, graph_kernels=3)
    assert found["graphs"] == 3
    assert found["copies_to_host"] == 1
    assert found["span_s"] == pytest.approx(107e-9)
    assert found["idle_inside_graphs_share"] == pytest.approx(3 / 107)
    assert found["idle_inside_cycles_share"] == pytest.approx(4 / 107)
    assert found["idle_between_cycles_share"] == pytest.approx(8 / 107)
    assert found["busy_share"] == pytest.approx((107 - 15) / 107)
    assert found["largest_gaps_outside_graphs"][0]["length_ns"] == 6


def test_a_copy_that_is_part_of_a_graph(tool: ModuleType) -> None:
    works = [
        tool.Work(0, 10, 1, "k"),
        tool.Work(10, 20, 1, "Memcpy DtoH (Device -> Pinned)"),
        tool.Work(25, 30, 2, "k"),
        tool.Work(30, 40, 2, "k"),
    ]
    found = tool.analyse(works, graph_kernels=2)
    assert found["idle_between_cycles_share"] == pytest.approx(5 / 40)
    assert found["idle_inside_cycles_share"] == 0


def test_a_recording_without_graphs_says_so(tool: ModuleType) -> None:
    assert tool.analyse([tool.Work(0, 1, 1, "k")]) == {"graphs": 0, "works": 1}
