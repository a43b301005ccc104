"""The engine's incremental drafting equals a reference that recomputes everything every time.

A wrong draft changes no answer, only the speed, so nothing else would notice these. Catches: a
feature paired with the wrong token or read from the wrong row of the verified tree, features in the
wrong order of layers, the head's cache not overwritten with true features after a draft, entries of
rejected drafts that stay visible, wrong positions or windows, a hidden state handed to a sibling's
child, a feedback before or after the norm where the other is due, and a wrong vocabulary map.
"""

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine import head_drafter as drafter_module
from fledge.engine.calibration import Calibration
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.models.head_files import save_head
from fledge.ops.tree import Candidates, TreeBatch
from fledge.testing import ScriptedDrafter, tiny_head
from tests.lossless.support import greedy, pair, prompts, scripted, token_ids
from tests.parity.reference_head import Context, Path_, ReferenceHead, true_features

MAX_TOKENS = 16
TOLERANCE = 2e-4
# Where two candidates are this close, either may be in the tree.
TIE = 1e-3
SHAPES = (
    *((1, 1, 1), (1, 5, 3), (2, 2, 6), (3, 5, 12)),
    *((4, 1, 4), (5, 3, 40), (6, 2, 9), (6, 5, 60)),
)


class CheckedDrafter(HeadDrafter):
    """Asks the head for its trees, checks them, and proposes the scripted ones instead."""

    def __init__(
        self,
        inner: HeadDrafter,
        proposer: ScriptedDrafter,
        reference: ReferenceHead,
        model: Any,
        settings: TreeSettings,
        scored: list[Candidates],
    ) -> None:
        self.__dict__.update(inner.__dict__)
        self.num_scratch = max(inner.num_scratch, proposer.num_scratch)
        self._proposer, self._reference = proposer, reference
        self._model, self._settings, self._scored = model, settings, scored
        self.num_checked = 0

    def draft(self, sequences: Many[Sequence], plan: DraftPlan) -> TreeBatch:
        tree = super().draft(sequences, plan)
        for i, seq in enumerate(sequences):
            self._check(i, seq, tree, self._scored[-1])
            self.num_checked += 1
        return self._proposer.draft(sequences, plan)

    def _check(self, row: int, seq: Sequence, tree: TreeBatch, scored: Candidates) -> None:
        tokens = [*seq.request.prompt_token_ids, *seq.output_ids]
        features = true_features(self._model, tokens[:-1], self.taps)
        # A tree is never wider than the draft vocabulary.
        width = min(self._settings.width, self._reference.config["draft_vocab_size"])
        context = Context(tokens, features)
        expected = self._reference.candidates(context, self._settings.depth, width)
        found = scored_paths(scored, row)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, abs=TOLERANCE)
        assert tree.tokens_BN[row, 0] == tokens[-1]
        kept = tree_paths(tree, row)
        # Fewer where the pass has no room for more.
        assert len(kept) <= min(self._settings.budget, len(expected))
        lowest = sorted(expected.values(), reverse=True)[max(0, len(kept) - 1)]
        assert all(expected[path] >= lowest - TIE for path in kept)


def scored_paths(scored: Candidates, row: int) -> dict[Path_, float]:
    """Path of tokens -> score, of every candidate the engine looked at."""
    paths: list[Path_] = []
    tokens, parents = scored.tokens_BC[row].tolist(), scored.parents_BC[row].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, scored.scores_BC[row].tolist(), strict=True))


def tree_paths(tree: TreeBatch, row: int) -> set[Path_]:
    paths: list[Path_] = [()]
    size = int(tree.sizes_B[row])
    tokens, parents = tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
    for node in range(1, size):
        paths.append((*paths[parents[node]], tokens[node]))
    assert len(set(paths)) == size
    return set(paths[1:])


def run_checked(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    *,
    architecture: str = "llama",
    tree: TreeSettings | None = None,
    num_prompts: int = 3,
    num_rounds: int = 1,
    engine_settings: dict[str, Any] | None = None,
    **flags: Any,
) -> CheckedDrafter:
    """Answer some prompts, every draft checked; about four in five scripted drafts are right."""
    tree = tree or TreeSettings(depth=3, width=3, budget=8)
    model, target = pair(architecture)
    head = tiny_head(target, **flags)
    save_head(head, directory / "head")
    reference = ReferenceHead(directory / "head", target.embedding.weight.detach())
    scored: list[Candidates] = []
    real = drafter_module.select_trees

    def spy(root_tokens_B: Any, candidates: Candidates, **limits: int) -> TreeBatch:
        scored.append(candidates)
        return real(root_tokens_B, candidates, **limits)

    monkeypatch.setattr(drafter_module, "select_trees", spy)
    monkeypatch.setattr(Calibration, "apply", lambda self, logprobs, *args: logprobs)
    asked = prompts(num_prompts)
    answers = greedy(architecture, asked, max_tokens=MAX_TOKENS)
    settings = EngineSettings(tree=tree, **(engine_settings or {}))
    checked = CheckedDrafter(
        HeadDrafter(head, target, settings),
        scripted(asked, answers, accuracy=0.8, depth=4, width=2, budget=10),
        reference,
        model,
        tree,
        scored,
    )
    engine = Engine(target, settings=settings, drafter=checked)
    completions = [
        completion
        for _ in range(num_rounds)
        for completion in engine.generate(asked, SamplingParams(max_tokens=MAX_TOKENS))
    ]
    assert token_ids(completions) == answers * num_rounds
    total_cycles = sum(completion.stats.cycles for completion in completions)
    assert checked.num_checked == total_cycles
    reused = [completion.stats.num_prompt_reused for completion in completions[num_prompts:]]
    assert all(count > 0 for count, prompt in zip(reused, asked, strict=False) if len(prompt) > 1)
    accepted = sum(completion.stats.num_tokens - 1 for completion in completions)
    assert accepted > 1.5 * total_cycles, "too few drafts were accepted to test anything"
    return checked


@pytest.mark.parametrize(
    ("architecture", "depth", "width", "budget"),
    [
        *(("llama", *shape) for shape in SHAPES),
        *(("gemma3-hybrid", *shape) for shape in SHAPES[1::3]),
        *(
            pytest.param("gemma3-hybrid", *shape, marks=pytest.mark.slow)
            for shape in SHAPES
            if shape not in SHAPES[1::3]
        ),
    ],
)
def test_tree_shapes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    architecture: str,
    depth: int,
    width: int,
    budget: int,
) -> None:
    tree = TreeSettings(depth=depth, width=width, budget=budget)
    run_checked(monkeypatch, tmp_path, architecture=architecture, tree=tree, num_prompts=2)


@pytest.mark.parametrize(
    "flags",
    [
        {"fc_norm": True, "norm_output": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"norm_before_residual": True},
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
        {"sliding_window": 1},
        {"sliding_window": 5},
        {"attention_bias": True},
        {"attention_bias": True, "output_bias": True, "qk_norm": True},
        {"rope_theta": 500.0, "rms_norm_eps": 1e-2},
        {"num_heads": 8, "num_kv_heads": 4},
        {"taps": (0, 3, 4)},
        {"taps": (4, 0, 2)},
        {"taps": (1, 3), "num_taps": 2},
        {"taps": (0, 1, 2, 3, 4), "num_taps": 5, "fc_norm": True},
        {"draft_vocab_size": 97},
        {"draft_vocab_size": 2},
    ],
    ids=str,
)
def test_head_variants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, Any]
) -> None:
    run_checked(monkeypatch, tmp_path, **flags)


@pytest.mark.parametrize("architecture", ["gemma3-hybrid", "qwen3-moe", "llama-tied"])
def test_many_requests_of_unequal_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str
) -> None:
    run_checked(monkeypatch, tmp_path, architecture=architecture, num_prompts=5)


def test_requests_that_come_and_go_on_small_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slots are reused by other requests: what an earlier one left there must not be seen."""
    small = {"max_requests": 2, "max_pass_tokens": 30, "block_size": 3}
    run_checked(monkeypatch, tmp_path, num_prompts=8, sliding_window=7, engine_settings=small)


@pytest.mark.parametrize(
    ("architecture", "sliding_window"),
    [
        *(("llama", 5), ("gemma3-hybrid", None)),
        pytest.param("llama", None, marks=pytest.mark.slow),
        pytest.param("gemma3-hybrid", 5, marks=pytest.mark.slow),
    ],
)
def test_prefix_hits_and_chunk_borders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, sliding_window: int | None
) -> None:
    """A head entry is made of the feature before its own token: at a border that is the hard one.

    The second round starts from what the first one left in the cache, in the middle of blocks too.
    """
    small = {"max_requests": 4, "max_pass_tokens": 30, "block_size": 4}
    run_checked(
        monkeypatch,
        tmp_path,
        architecture=architecture,
        num_prompts=6,
        num_rounds=2,
        sliding_window=sliding_window,
        engine_settings=small,
    )
