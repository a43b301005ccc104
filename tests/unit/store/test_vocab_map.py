"""The draft vocabulary: which tokens, in which order, and how it is stored."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.store.vocab_map import VocabMap, choose_vocabulary


def test_the_most_frequent_tokens_and_lower_ids_among_equals() -> None:
    counts = np.array([0, 5, 9, 5, 1, 5, 0, 0])
    assert choose_vocabulary(counts, 3).target_ids.tolist() == [1, 2, 3]
    assert choose_vocabulary(counts, 4).target_ids.tolist() == [1, 2, 3, 5]


def test_tokens_that_end_answers_are_always_in() -> None:
    counts = np.array([0, 5, 9, 5, 1, 5, 0, 0])
    assert choose_vocabulary(counts, 3, {7, 4}).target_ids.tolist() == [2, 4, 7]
    with pytest.raises(ConfigError, match="draft_vocab_size is 1, and 2 tokens that end answers"):
        choose_vocabulary(counts, 1, {7, 4})
    with pytest.raises(ConfigError, match="with token id 8, and its vocabulary has ids 0 to 7"):
        choose_vocabulary(counts, 3, {8})


def test_the_lowest_unused_ids_fill_the_rest() -> None:
    assert choose_vocabulary(np.array([0, 0, 0, 7, 0]), 3).target_ids.tolist() == [0, 1, 3]
    assert len(choose_vocabulary(np.zeros(5, np.int64), 9)) == 5


def test_maps_as_heads_store_them(tmp_path: Path) -> None:
    made = choose_vocabulary(np.array([0, 5, 9, 0, 1]), 2, {4})
    assert made.target_ids.tolist() == [2, 4]
    assert made.d2t.tolist() == [2, 3]
    assert made.t2d.tolist() == [False, False, True, False, True]
    made.save(tmp_path / "map.safetensors")
    stored = load_file(tmp_path / "map.safetensors")
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)
    read = VocabMap.load(tmp_path / "map.safetensors")
    assert (read.target_ids.tolist(), read.vocab_size) == ([2, 4], 5)


def test_coverage() -> None:
    made = choose_vocabulary(np.array([1, 5, 4]), 2)
    assert made.coverage(np.array([1, 5, 4])) == 0.9
    assert made.coverage(np.zeros(3, np.int64)) == 1.0


def test_damaged_maps_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    with pytest.raises(ArtifactError, match="holds no draft vocabulary"):
        VocabMap.load(path)
    path.write_bytes(b"not tensors")
    with pytest.raises(ArtifactError, match="holds no draft vocabulary"):
        VocabMap.load(path)
    save_file({"d2t": np.array([0, 0]), "t2d": np.array([True, False, True])}, path)
    with pytest.raises(ArtifactError, match="d2t and t2d in .* name different tokens"):
        VocabMap.load(path)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=40), data=st.data())
def test_no_token_outside_is_more_frequent(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    made = choose_vocabulary(np.array(counts), size, always)
    chosen = made.target_ids.tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert always <= set(chosen)
    free = [(-counts[one], one) for one in chosen if one not in always]
    outside = [(-counts[one], one) for one in range(len(counts)) if one not in chosen]
    assert not free or not outside or max(free) < min(outside)
    assert (made.d2t + np.arange(size)).tolist() == chosen
    assert np.flatnonzero(made.t2d).tolist() == chosen
