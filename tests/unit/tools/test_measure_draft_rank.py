"""Directions of a head's output in which logits differ."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import measure_draft_rank

    module: ModuleType = measure_draft_rank
    return module


def test_outputs_in_few_directions_need_as_many_numbers(tool: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows_VD, inside_RD = draw(200, 24), draw(5, 24)
    known_TD, asked_TD = draw(300, 5) @ inside_RD, draw(300, 5) @ inside_RD
    reduce_RD, reduced_VR = tool.projection(rows_VD, known_TD, 5)
    logits_TV = asked_TD @ rows_VD.T
    assert torch.allclose(asked_TD @ reduce_RD.T @ reduced_VR.T, logits_TV, atol=0.05)
    all_found = tool.found_among_first(rows_VD, known_TD, asked_TD, 5)
    assert all_found["1"] > 0.97
    fewer = tool.found_among_first(rows_VD, known_TD, asked_TD, 3)
    assert fewer["1"] < all_found["1"]
    assert list(fewer.values()) == sorted(fewer.values())
