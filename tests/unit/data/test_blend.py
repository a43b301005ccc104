"""Shares, choice and order of the rows of a blend."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.contracts.errors import ArtifactError
from fledge.data.blend import choose_lines, interleave, row_hash, share_rows
from fledge.data.row_files import RowFiles


def write(directory: Path, num_rows: int, rows_per_file: int = 100, name: str = "a") -> Path:
    files = RowFiles(directory)
    for number in range(num_rows):
        files.write(line(f"{name}:{number}"))
        if files.num_rows == rows_per_file:
            files.publish()
    files.publish()
    return directory


def line(row_id: str) -> bytes:
    return json.dumps({"id": row_id, "messages": []}, separators=(",", ":")).encode() + b"\n"


def ids(lines: list[bytes]) -> list[str]:
    return [json.loads(one)["id"] for one in lines]


@pytest.mark.parametrize(
    ("available", "weights", "total", "shares"),
    [
        ([100, 100], [1, 1], 10, [5, 5]),
        ([100, 100], [3, 1], 8, [6, 2]),
        ([100, 100, 100], [1, 1, 1], 10, [4, 3, 3]),
        ([100, 100], [0, 1], 10, [0, 10]),
        ([2, 100, 100], [1, 1, 1], 30, [2, 14, 14]),
        ([2, 5, 100], [1, 1, 1], 30, [2, 5, 23]),
        ([2, 100, 100], [1, 2, 1], 30, [2, 19, 9]),
        ([3, 4], [1, 1], 100, [3, 4]),
        ([3, 4], [1, 0], 100, [3, 0]),
        ([0, 0], [1, 1], 5, [0, 0]),
        ([5], [0.001], 5, [5]),
    ],
)
def test_shares(available: list[int], weights: list[float], total: int, shares: list[int]) -> None:
    assert share_rows(available, weights, total) == shares


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2000), st.floats(0, 1e6, allow_subnormal=False, allow_infinity=False)
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 5000),
)
def test_shares_add_up_and_never_ask_too_much(sources: list[tuple[int, float]], total: int) -> None:
    available, weights = [rows for rows, _ in sources], [weight for _, weight in sources]
    shares = share_rows(available, weights, total)
    given_at_most = sum(rows for rows, weight in sources if weight > 0)
    assert sum(shares) == min(total, given_at_most)
    assert all(0 <= share <= rows for share, rows in zip(shares, available, strict=True))
    assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)


def test_the_smallest_hashes_are_chosen_in_their_order(tmp_path: Path) -> None:
    directory = write(tmp_path, 1000)
    everything = [line(f"a:{number}") for number in range(1000)]
    for num_chosen in (1, 2, 500, 998, 999):
        chosen = list(choose_lines(directory, 1000, num_chosen, seed=3))
        last = sorted(row_hash(one, 3) for one in everything)[num_chosen - 1]
        assert chosen == [one for one in everything if row_hash(one, 3) <= last]
        assert len(chosen) == num_chosen


def test_all_and_none(tmp_path: Path) -> None:
    directory = write(tmp_path, 10)
    assert len(list(choose_lines(directory, 10, 10, seed=0))) == 10
    assert list(choose_lines(directory, 10, 0, seed=0)) == []


def test_a_choice_follows_the_seed_and_not_the_company(tmp_path: Path) -> None:
    few, many = write(tmp_path / "few", 400), write(tmp_path / "many", 800, rows_per_file=7)
    of_few = set(choose_lines(few, 400, 200, seed=1))
    of_many = set(choose_lines(many, 800, 400, seed=1))
    # A row's hash does not depend on other rows: most rows chosen from few are chosen from many.
    assert len(of_few & of_many) > 150
    assert len(of_few & set(choose_lines(few, 400, 200, seed=2))) < 150
    assert of_few == set(choose_lines(few, 400, 200, seed=1))


def test_ids_with_quotes_and_any_language_have_hashes(tmp_path: Path) -> None:
    odd = ['a"b:1', "a\\:2", "東京:3", 'a\\"":4']
    assert len({row_hash(line(row_id), 0) for row_id in odd}) == 4
    with pytest.raises(ArtifactError, match="this is not a row that fledge wrote"):
        row_hash(b'{"messages": []}\n', 0)


def test_sources_are_spread_evenly() -> None:
    sources = [
        (count, [line(f"{name}:{i}") for i in range(count)])
        for name, count in (("a", 60), ("b", 30), ("c", 10), ("d", 0))
    ]
    mixed = ids(list(interleave(sources)))
    assert len(mixed) == 100
    for start in range(0, 100, 10):
        counts = Counter(row_id[0] for row_id in mixed[start : start + 10])
        assert counts["a"] in (5, 6, 7)
        assert counts["b"] in (2, 3, 4)
        assert counts["c"] in (0, 1, 2)
    for name in "abc":
        numbers = [int(row_id[2:]) for row_id in mixed if row_id[0] == name]
        assert numbers == sorted(numbers)


def test_missing_rows_are_noticed() -> None:
    with pytest.raises(ArtifactError, match="source 0 has 1 rows on disk where 3 were counted"):
        list(interleave([(3, [line("a:1")])]))
