"""Our heads in engines that nobody here wrote: same tokens, same acceptance at every position."""

import pytest

from fledge.interop.engines.acceptance import our_acceptance
from tests.engines.cases import DEPTH, Outcome

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

MAX_NEAR_TIES = 0.01
"""Of the drafts; llama.cpp was seen to choose otherwise in 1 of 350."""

FORCED = ("forced-default", "forced-other")
TRAINED = ("trained-default", "trained-other", "trained-normed", "trained-twice-normed")


@pytest.fixture
def outcome(outcomes: dict[str, Outcome], name: str) -> Outcome:
    if name not in outcomes:
        pytest.skip("OpenVINO knows no norms")
    return outcomes[name]


@pytest.mark.parametrize("name", FORCED + TRAINED)
def test_answers_are_ours_token_for_token(outcome: Outcome) -> None:
    ours = tuple(completion.token_ids for completion in outcome.ours)
    assert outcome.plain.token_ids == ours
    assert outcome.theirs.token_ids == ours


@pytest.mark.parametrize("name", FORCED + TRAINED)
def test_as_many_drafts_are_accepted_at_every_position(outcome: Outcome, name: str) -> None:
    """Counts, not rates: in float32 two right computations agree on every draft of these pairs, but
    for one that a trained head finds as good as another."""
    theirs = outcome.theirs.acceptance
    ours = our_acceptance(outcome.ours, DEPTH, theirs.counting)
    slack = 0 if name.startswith("forced") else MAX_NEAR_TIES * ours.num_drafts
    cycles = sum(completion.stats.cycles for completion in outcome.ours)
    assert abs(outcome.theirs.cycles - cycles) <= slack
    assert abs(theirs.num_drafts - ours.num_drafts) <= slack
    pairs = zip(theirs.accepted_at_position, ours.accepted_at_position, strict=True)
    assert all(abs(one - other) <= slack for one, other in pairs), (theirs, ours)


@pytest.mark.parametrize("name", FORCED)
def test_a_head_that_is_always_right_is_accepted_in_full(outcome: Outcome) -> None:
    acceptance = outcome.theirs.acceptance
    cycles = 5 if acceptance.counting == "all_but_last" else 6
    assert acceptance.num_drafts == cycles * len(outcome.case.prompts)
    assert set(acceptance.accepted_at_position) == {acceptance.num_drafts}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_head_is_often_right_and_often_wrong(outcome: Outcome) -> None:
    """Otherwise equal counts would say little."""
    rates = outcome.theirs.acceptance.rates
    assert all(rate is not None and 0.4 < rate < 0.95 for rate in rates), rates
