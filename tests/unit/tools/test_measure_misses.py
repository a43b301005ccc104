"""What is said of drafts that were wrong, against a text followed by hand."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import measure_misses

    module: ModuleType = measure_misses
    return module


def test_drafts_are_counted_by_how_sure_the_target_was(tool: ModuleType) -> None:
    # The prompt has 2 tokens; 4 is said first. Cycles begin behind places 2, 4 and 5.
    token_ids = [1, 2, 4, 7, 5, 0, 6, 3]
    drafts_TK = torch.tensor([[0, 0], [7, 6], [0, 0], [6, 5], [6, 3], [0, 0], [0, 0], [0, 0]])
    probs_TV = torch.full((8, 8), 0.01)
    probs_TV[2, 7] = 0.9  # sure of 7, which the head guesses
    probs_TV[3, 5], probs_TV[3, 6] = 0.5, 0.4  # nearly as sure of the draft
    probs_TV[4, 0], probs_TV[4, 6], probs_TV[4, 1] = 0.35, 0.2, 0.3  # less sure of it
    probs_TV[5, 6] = probs_TV[6, 3] = 0.99
    found = list(tool.follow(drafts_TK, probs_TV, token_ids, 2))
    assert [(one.depth, one.is_right, one.is_second) for one in found] == [
        (0, True, False),
        (1, False, True),
        (0, False, False),
        (0, True, False),
        (1, True, False),
    ]
    said = tool.summary(found, 6)
    assert (said["num_drafts"], said["num_wrong"], said["wrong_by_depth"]) == (5, 2, [1, 1])
    assert said["wrong_that_are_the_second_best"] == 0.5
    shares = {tuple(one["target_probability"]): one for one in said["by_target_probability"]}
    assert shares[0.5, 0.6]["share_of_wrong"] == shares[0.3, 0.4]["share_of_wrong"] == 0.5
    assert shares[0.97, 1.0]["wrong"] == 0.0
    assert sum(one["share_of_drafts"] for one in shares.values()) == pytest.approx(1.0)
