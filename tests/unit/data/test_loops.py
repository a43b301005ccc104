"""Looping spans: the third time is one time too many."""

import numpy as np

from fledge.data.loops import MAX_PERIOD, MIN_RUN, find_loop
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


def test_the_same_place_as_by_looking_at_every_period() -> None:
    random = np.random.default_rng(5)
    for _ in range(300):
        num_tokens = int(random.integers(0, 300))
        tokens = random.integers(0, 3 + int(random.integers(0, 40)), num_tokens)
        period, start = int(random.integers(1, 70)), int(random.integers(0, 200))
        circle = tokens[start : start + period]
        again = np.concatenate([tokens[:start], np.tile(circle, 4), tokens[start:]])
        ids = again[: int(random.integers(0, len(again) + 1))].tolist()
        assert find_loop(ids) == _search_plainly(ids)


def _search_plainly(ids: list[int]) -> int | None:
    found = []
    for period in range(1, min(MAX_PERIOD, len(ids) // 3) + 1):
        length = 0
        for place in range(period, len(ids)):
            length = length + 1 if ids[place] == ids[place - period] else 0
            if length == max(2 * period, MIN_RUN):
                found.append(place - length + 1)
                break
    return min(found, default=None)
