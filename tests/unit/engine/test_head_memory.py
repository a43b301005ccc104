"""What a head drafts depends on the tokens before it, not on how its memory came to be.

Prompts that are known in part, read in chunks, decoded plainly for a while with the head left
behind, preempted and taken up again: every tree must be the one of a head that has read everything
anew. Catches entries that are promised and not there, of another token, or behind a window that
has moved on; nothing of that shows in the answers, only in how many drafts are accepted.
"""

import random
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.draft_plan import PLAIN, DraftPlan
from fledge.engine.sequence import Sequence
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model

TREE = TreeSettings(depth=3, width=2, budget=6)
Tree = tuple[list[int], list[int]]


class WatchedEngine:
    """Keeps every tree that is drafted, by the tokens it was drafted for."""

    def __init__(self, target: Target, head: Eagle3Head, **settings: Any) -> None:
        self.engine = Engine(target, head, EngineSettings(tree=TREE, **settings))
        self.trees: dict[tuple[int, ...], Tree] = {}
        self.is_plain = False
        drafter: Any = self.engine._drafter
        # Acceptance learnt on the way would change which nodes are drafted.
        drafter.calibration.refresh = lambda: None
        self._draft, drafter.draft = drafter.draft, self._watch
        controller: Any = self.engine._controller
        self._choose, controller.choose = controller.choose, self._decide

    def _watch(self, sequences: list[Sequence], plan: DraftPlan) -> Any:
        trees = self._draft(sequences, plan)
        for i, seq in enumerate(sequences):
            tree = (trees.tokens_BN[i].tolist(), trees.parents_BN[i].tolist())
            self.trees[tuple(seq.token_ids)] = tree
        return trees

    def _decide(self, load: Any) -> DraftPlan:
        return PLAIN if self.is_plain else self._choose(load)

    def add(self, prompt: list[int], max_tokens: int) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.engine.add(self.engine.make_request(prompt, params))


def tree_anew(target: Target, head: Eagle3Head, token_ids: tuple[int, ...]) -> Tree:
    """By an engine that knows nothing: it reads all but the newest token, says it, and drafts."""
    watched = WatchedEngine(target, head, share_prefixes=False, cache_tokens=400)
    seq = watched.add(list(token_ids[:-1]), 5)
    watched.engine.step()
    assert tuple(seq.token_ids) == token_ids
    watched.engine.step()
    return watched.trees[token_ids]


@pytest.mark.parametrize("block_size", [3, 8])
@pytest.mark.parametrize(
    ("architecture", "window"),
    [("llama", None), ("llama", 6), ("gemma3-hybrid", 8), ("mistral-sliding", None)],
)
def test_trees_do_not_depend_on_how_memory_came_to_be(
    architecture: str, window: int | None, block_size: int
) -> None:
    target = target_of(tiny_model(architecture))
    head = tiny_head(target, sliding_window=window)
    watched = WatchedEngine(
        target, head, block_size=block_size, max_requests=1, max_pass_tokens=16, cache_tokens=200
    )
    rng = random.Random(block_size)
    known = [rng.randrange(3, 97) for _ in range(20)]
    for _ in range(6):
        stem = known[: rng.randrange(1, len(known))]
        seq = watched.add([*stem, rng.randrange(3, 97)], rng.randrange(8, 20))
        while not seq.is_finished:
            watched.is_plain = rng.random() < (0.8 if len(seq.output_ids) < 8 else 0.2)
            watched.engine.step()
            if rng.random() < 0.1:
                watched.engine.preempt(seq)
        known = list(seq.token_ids)
    drafted = sorted(watched.trees)
    assert len(drafted) > 20
    for token_ids in rng.sample(drafted, 12):
        assert watched.trees[token_ids] == tree_anew(target, head, token_ids)


def test_a_branch_into_what_a_window_head_has_skipped() -> None:
    """Twenty tokens were decoded plainly, so the head never made entries for most of them."""
    target = target_of(tiny_model("llama"))
    head = tiny_head(target, sliding_window=6)
    watched = WatchedEngine(target, head, block_size=4, max_requests=1, cache_tokens=200)
    first = watched.add([5, 9, 11], 24)
    while not first.is_finished:
        watched.is_plain = len(first.output_ids) < 20
        watched.engine.step()
    watched.trees.clear()
    second = watched.add([*first.token_ids[:14], 7], 4)
    while not second.is_finished:
        watched.engine.step()
    assert second.num_prompt_reused == 14
    assert watched.trees
    for token_ids, tree in watched.trees.items():
        assert tree == tree_anew(target, head, token_ids)


def test_a_block_whose_first_entries_were_skipped() -> None:
    """Block 0 is known with its entries; in block 1 the head begins at token 11, not at token 8."""
    target = target_of(tiny_model("llama"))
    head = tiny_head(target, sliding_window=6)
    watched = WatchedEngine(target, head, block_size=8, max_requests=1, cache_tokens=200)
    prompt = [5, 9, 11, 20, 21, 22, 23, 24, 25]

    def finish(seq: Sequence, num_plain: int = 0) -> Sequence:
        while not seq.is_finished:
            watched.is_plain = len(seq.output_ids) < num_plain
            watched.engine.step()
        return seq

    finish(watched.add(prompt, 2))
    second = finish(watched.add(prompt, 10), num_plain=8)
    watched.trees.clear()
    third = finish(watched.add([*second.token_ids[:12], 7], 4))
    assert third.num_prompt_reused == 12
    for token_ids, tree in watched.trees.items():
        assert tree == tree_anew(target, head, token_ids)
