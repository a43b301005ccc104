"""Drafts followed along a text, against the engine that drafts them."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.models.head_files import load_head
from fledge.models.target import Target
from tests.engines.forced_pair import CIRCLE, save_forced_head, save_forced_target

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import replay_acceptance

    module: ModuleType = replay_acceptance
    return module


def test_a_cycle_ends_at_the_first_draft_that_the_text_lacks(tool: ModuleType) -> None:
    drafts_TK = torch.tensor([[0, 0], [7, 8], [0, 0], [9, 5], [6, 6], [2, 1], [0, 0]])
    # The prompt has 2 tokens; 4 is said first. Cycles begin behind places 2, 4 and 6.
    token_ids = [1, 2, 4, 7, 5, 9, 6, 1]
    assert tool.follow(drafts_TK, token_ids, 2) == (3, [2, 0])


def test_texts_replayed_give_what_the_engine_accepted(tool: ModuleType, tmp_path: Path) -> None:
    where = save_forced_target(tmp_path / "t")
    target = Target.load(where, dtype=torch.float32, device=torch.device("cpu"))
    head = load_head(save_forced_head(tmp_path / "h"))
    tree = TreeSettings(depth=3, width=1, budget=3)
    engine = Engine(target, head, EngineSettings(tree=tree, controller="fixed"))
    prompt = [CIRCLE[7]] * 3
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=61, ignore_eos=True))
    token_ids = [*prompt, *answer.token_ids]
    cycles, accepted = tool.follow(tool.drafted(target, head, token_ids, 3), token_ids, len(prompt))
    assert answer.stats.accept_length > 2
    assert 60 / cycles == pytest.approx(answer.stats.accept_length, rel=0.05)
    assert sum(accepted) + cycles == pytest.approx(60, abs=3)
