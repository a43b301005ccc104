"""What a cycle said becomes part of an answer, and how its drafts fared.

Catches: an answer that ends elsewhere where nothing but tokens and lengths can end it, which has a
way of its own because most answers take it, and tallies that disagree with counting cycle by cycle.
"""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge import SamplingParams
from fledge.engine.commits import Said, commit
from fledge.engine.draft_tally import DraftTally
from fledge.engine.request import Request
from fledge.engine.sequence import Sequence
from fledge.ops.logit_rules import TokenCounts

ENDS = frozenset({0, 1})


def sequence(max_new_tokens: int, **params: Any) -> Sequence:
    request = Request(
        prompt_token_ids=(5, 6),
        params=SamplingParams(max_tokens=max_new_tokens, **params),
        max_new_tokens=max_new_tokens,
        eos_token_ids=ENDS,
    )
    return Sequence(request, TokenCounts(8, torch.device("cpu")))


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 12),
)
def test_an_answer_ends_where_it_ends_token_by_token(
    cycles: list[list[int]], max_new_tokens: int
) -> None:
    # Depths of drafts are asked for token by token.
    quick = sequence(max_new_tokens)
    slow = sequence(max_new_tokens, draft_depths=True)
    for number, tokens in enumerate(cycles):
        taken = [one.commit(list(tokens), now=float(number)) for one in (quick, slow)]
        assert taken[0] == taken[1]
        assert quick.output_ids == slow.output_ids
        assert quick.token_ids == slow.token_ids == [5, 6, *quick.output_ids]
        assert quick.finish_reason == slow.finish_reason
        if quick.is_finished:
            break


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_a_tally_is_what_counting_depth_by_depth_gives(pairs: list[tuple[int, int]]) -> None:
    cycles = [(max(pair), min(pair)) for pair in pairs]
    tally = DraftTally()
    for offered, accepted in cycles:
        tally.count(offered, accepted)
    deepest = max((offered for offered, _ in cycles), default=0)
    depths = range(1, deepest + 1)
    assert tally.offered_at_depth == tuple(
        sum(offered >= depth for offered, _ in cycles) for depth in depths
    )
    assert tally.accepted_at_depth == tuple(
        sum(accepted >= depth for _, accepted in cycles) for depth in depths
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_a_cycle_is_counted_as_a_tally_would(pairs: list[tuple[int, int]]) -> None:
    cycles, tally = [(max(pair), min(pair)) for pair in pairs], DraftTally()
    for offered, accepted in cycles:
        tally.count(offered, accepted)
    found = commit(
        [
            Said(sequence(20), [7] * (accepted + 1), offered, has_failed=False, had_drafts=True)
            for offered, accepted in cycles
        ]
    )
    assert found.reached_at_depth == tally.offered_at_depth
    assert found.accepted_at_depth == tally.accepted_at_depth
    assert found.num_emitted == sum(accepted + 1 for _, accepted in cycles)
