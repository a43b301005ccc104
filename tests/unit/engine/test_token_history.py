"""Where the newest tokens stood before, and what followed there."""

import random

from fledge.engine.token_history import Copy, TokenHistory
from fledge.ops.copies import LEAST_MATCH, MOST_MATCH

SOME = list(range(10, 10 + LEAST_MATCH))


def _find(token_ids: list[int], count: int = 4) -> Copy | None:
    return TokenHistory().find(token_ids, count)


def test_what_followed_is_copied() -> None:
    assert _find([1, *SOME, 2, 3, 4, 5, 9, *SOME]) == Copy(LEAST_MATCH, [2, 3, 4, 5])


def test_too_few_tokens_are_no_match() -> None:
    assert _find([1, *SOME[1:], 2, 3, 4, 5, 9, *SOME[1:]]) is None
    assert _find(SOME) is None
    assert _find([7]) is None


def test_a_text_that_ends_where_it_began_goes_on_in_circles() -> None:
    circle = [*SOME, 5]
    found = _find([*circle, *circle], 2 * len(circle))
    assert found == Copy(len(circle), circle * 2)
    assert _find([3] * 9, 5) == Copy(8, [3] * 5)


def test_the_longest_match_counts_and_then_the_latest() -> None:
    longer = [8, *SOME]
    text = [*longer, 1, 1, 0, *SOME, 2, 2, *longer]
    assert _find(text, 2) == Copy(len(longer), [1, 1])
    text = [*longer, 1, 1, *longer, 2, 2, *longer]
    assert _find(text, 2) == Copy(len(longer), [2, 2])
    long = list(range(50, 50 + MOST_MATCH))
    text = [4, *long, 1, 5, *long, 2, 4, *long]
    assert _find(text, 1) == Copy(MOST_MATCH, [2]), "more than the longest is not looked at"


def test_a_text_that_grows_is_the_same_as_a_new_one() -> None:
    rng = random.Random(0)
    history, text = TokenHistory(), list[int]()
    num_found = 0
    while len(text) < 1500:
        text += [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        found = history.find(text, 5)
        assert found == _slowly(text, 5)
        num_found += found is not None
    assert num_found > 100


def _slowly(text: list[int], count: int) -> Copy | None:
    best = (0, 0)
    for end in range(len(text) - 1):
        length = 0
        while length < min(MOST_MATCH, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        best = max(best, (length, end))
    if best[0] < LEAST_MATCH:
        return None
    grown = list(text)
    for place in range(count):
        grown.append(grown[best[1] + 1 + place])
    return Copy(best[0], grown[len(text) :])
