"""Signatures estimate similarity, bands find pairs, and neither ever changes."""

import math
import random

import numpy as np
import pytest

from fledge.data.minhash import SHINGLE_WORDS, MinHasher, choose_bands, pack, similarity

HASHER = MinHasher(0.8)


def signature(words: list[str]) -> bytes:
    return pack(HASHER.minima(words))


def exact_similarity(first: list[str], second: list[str]) -> float:
    def shingles(words: list[str]) -> set[tuple[str, ...]]:
        blanks = [""] * (SHINGLE_WORDS - 1)
        padded = [*blanks, *words, *blanks]
        return {tuple(padded[i : i + SHINGLE_WORDS]) for i in range(len(padded) - 4)}

    a, b = shingles(first), shingles(second)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0])
def test_bands_find_nearly_every_pair_at_the_threshold(threshold: float) -> None:
    num_bands, size = choose_bands(threshold)
    assert 1 - (1 - threshold**size) ** num_bands >= 0.98
    assert size >= 2
    assert num_bands * size <= 256


def test_bands_meet_few_strangers() -> None:
    num_bands, size = choose_bands(0.8)
    assert 1 - (1 - 0.1**size) ** num_bands < 0.001


def test_estimates_are_as_good_as_their_number_of_bits_allows() -> None:
    draw = random.Random(0)
    vocabulary = [f"w{i}" for i in range(300)]
    errors = []
    for _ in range(300):
        first = draw.choices(vocabulary, k=draw.choice([30, 90, 300]))
        second = list(first)
        for _ in range(draw.choice([1, 2, 5, 9])):
            second[draw.randrange(len(second))] = draw.choice(vocabulary)
        true = exact_similarity(first, second)
        equal = 0.25 + 0.75 * true
        deviation = math.sqrt(equal * (1 - equal) / 256) / 0.75
        errors.append((similarity(signature(first), signature(second)) - true) / deviation)
    assert abs(np.mean(errors)) < 0.25
    assert 0.8 < np.std(errors) < 1.2


def test_unrelated_texts_are_unlike_and_equal_ones_alike() -> None:
    first, second = ([f"{side}{i}" for i in range(50)] for side in "ab")
    assert similarity(signature(first), signature(second)) < 0.2
    assert similarity(signature(first), signature(first)) == 1.0


def test_a_changed_word_costs_the_same_wherever_it_stands() -> None:
    words = [f"w{i}" for i in range(60)]
    changed = [[*words[:i], "other", *words[i + 1 :]] for i in (0, 30, 59)]
    assert len({exact_similarity(words, other) for other in changed}) == 1


def test_long_texts_are_read_in_parts() -> None:
    words = [f"w{i}" for i in range(5000)]
    parts = [words[i : i + 300] for i in range(0, 4700, 250)]
    inner = np.minimum.reduce([HASHER.minima(part) for part in [*parts, words[4700:]]])
    # Every 5-gram of the whole is in a part; the parts have blanks of their own besides.
    assert (inner <= HASHER.minima(words)).all()
    assert np.mean(inner == HASHER.minima(words)) > 0.9


def test_families_never_meet() -> None:
    minima = HASHER.minima(["word"] * 30)
    assert set(HASHER.keys(minima, 1)).isdisjoint(HASHER.keys(minima, 1000))
    assert HASHER.keys(minima, 1) == HASHER.keys(minima, 1)


def test_the_file_format_stays() -> None:
    """An index that was begun by an earlier fledge goes on with this one."""
    words = "the quick brown fox jumps over the lazy dog"
    minima = HASHER.minima(words.split(" "))
    assert pack(minima).hex() == (
        "f1b1efa3b7616675b4dc18c5147fe39f0d16ee6bda4c7bfac5e67f319d3250fe"
        "c45c6c27004979b080ab27ffd28df68ef6ceed8b11b748829f39f128c5217ea5"
    )
    assert HASHER.keys(minima, 7)[:3] == [211155197984635, 108266391087221, 1863308420448]
