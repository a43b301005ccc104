"""Looping spans: the third time is one time too many."""

from fledge.lab.loops import find_loop


def test_spans_begin_with_the_second_time() -> None:
    assert find_loop([7, 8, *[1, 2, 3] * 7]) == 5
    assert find_loop([5] * 17) == 1


def test_what_is_short_or_varied_is_no_loop() -> None:
    assert find_loop([]) is None
    assert find_loop(list(range(200))) is None
    assert find_loop([5] * 16) is None, "15 tokens that repeat"
    assert find_loop([1, 2, 3] * 2 + list(range(10, 30))) is None
    sentence = list(range(40))
    assert find_loop(sentence * 2 + [99]) is None, "said twice"
    assert find_loop(sentence * 3) == 40
    assert find_loop(list(range(65)) * 4) is None, "longer than the longest period"


def test_the_earliest_of_several_counts() -> None:
    assert find_loop([*range(30), *[1, 2] * 10, *range(50, 80), *[3] * 20]) == 32
