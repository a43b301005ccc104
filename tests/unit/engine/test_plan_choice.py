"""What a load says of the requests: how much they may say yet, where somebody asks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fledge.engine.draft_plan import Controller
from fledge.engine.plan_choice import PlanChoice
from fledge.engine.sequence import Sequence


def choice(*, expects_drafts: bool) -> PlanChoice:
    controller = SimpleNamespace(expects_drafts=expects_drafts, is_asleep=False, is_exam=False)
    return PlanChoice(
        cast(Controller, controller),
        lambda count: (count, None),
        can_draft=True,
        max_pass_tokens=64,
    )


def decoding(lengths: list[int]) -> list[Sequence]:
    """So many of 100 tokens are said."""
    found: list[Any] = [
        SimpleNamespace(
            request=SimpleNamespace(max_new_tokens=100),
            output_ids=[0] * length,
            len=length,
            head_len=0,
            kv_len=length,
            may_have_drafts=True,
            lacks_features=False,
        )
        for length in lengths
    ]
    return found


@pytest.mark.parametrize("num_requests", [1, 8, 31, 256])
def test_what_is_left_is_counted_while_nothing_is_drafted(num_requests: int) -> None:
    load = choice(expects_drafts=False).load(decoding([60] * num_requests))
    assert load.tokens_left == 40 * num_requests


def test_few_are_counted_one_by_one() -> None:
    load = choice(expects_drafts=False).load(decoding([10, 20, 99]))
    assert load.tokens_left == 90 + 80 + 1


def test_nobody_asks_what_is_left_while_drafting() -> None:
    assert choice(expects_drafts=True).load(decoding([10, 20])).tokens_left is None


def test_nobody_decodes() -> None:
    assert choice(expects_drafts=False).load([]).tokens_left == 0
