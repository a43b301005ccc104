"""Counts of two engines become shares of the same things."""

from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import acceptance_table

    module: ModuleType = acceptance_table
    return module


def test_groups_are_pooled_by_their_cycles(tool: ModuleType) -> None:
    found = tool.pool_groups(
        {
            "vllm": [
                {"num_drafts": 10, "accepted_at_position": [8, 4]},
                {"num_drafts": 90, "accepted_at_position": [72, 28]},
            ],
            "fledge": [{"num_drafts": 100, "accepted_at_position": (79, 32)}],
        }
    )
    assert found["cycles"] == {"vllm": 100, "fledge": 100}
    assert found["accepted_up_to_position"]["vllm"] == [0.8, 0.32]
    assert found["difference_at_position"] == [0.01, 0.0]
    assert found["accepted_given_those_before"]["vllm"] == [0.8, 0.4]
