"""Looping spans: the third time is one time too many."""

from fledge.data.loops import MIN_RUN, find_loop
from fledge.data.masks import MaskedSample


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


def test_samples_end_soon_after_an_answer_begins_to_circle() -> None:
    circle = [7, 8, 9]
    prompt, answer = circle * 20, [1, 2, 3, 4, *circle * 20]
    sample = MaskedSample(1, prompt + answer, [False] * 60 + [True] * 64)
    # What the user repeats is no circle of the target's.
    assert sample.loop_end() == 60 + 4 + 3 + MIN_RUN
    assert MaskedSample(1, answer, [False] * 64).loop_end() is None
    assert MaskedSample(1, list(range(64)), [True] * 64).loop_end() is None
