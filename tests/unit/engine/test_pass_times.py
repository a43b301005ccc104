"""Pass times: between and beyond what was measured, corrected by real passes, kept on disk."""

import json
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError
from fledge.engine.pass_times import PassCurve, PassTimes, measure_curve, measured_sizes
from fledge.engine.pass_times_cache import load_or_measure


def test_times_lie_on_lines_between_measured_sizes_and_go_on_beyond() -> None:
    curve = PassCurve([1, 8, 64], [1.0, 1.7, 7.3])
    assert curve.at(1) == pytest.approx(1.0)
    assert curve.at(4.5) == pytest.approx(1.35)
    assert curve.at(128) > curve.at(64) > curve.at(8)
    times = PassTimes(curve, context_s=0.01)
    assert times.target_s(8, context_tokens=100) == pytest.approx(2.7)
    assert times.head_s(5) == 0.0


def test_noise_does_not_make_larger_passes_cheaper() -> None:
    curve = PassCurve([1, 2, 4], [1.0, 0.8, 1.2])
    assert curve.at(1) <= curve.at(2) <= curve.at(4)


def test_real_passes_correct_the_times_and_one_stutter_does_not() -> None:
    curve = PassCurve([1, 8, 64], [1.0, 1.5, 4.0])
    for _ in range(60):
        curve.refine(8, 3.0)
    assert curve.at(8) == pytest.approx(3.0, rel=0.1)
    before = curve.at(8)
    curve.refine(8, 300.0)
    assert curve.at(8) < 1.25 * before
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        curve.refine(8, nonsense)
    assert curve.at(8) < 1.25 * before


def test_a_small_pass_that_was_seen_once_is_no_slower_than_a_larger_one_seen_often() -> None:
    """Otherwise plain decoding that stuttered once would make any drafting look good."""
    curve = PassCurve([1, 2, 4], [1.0, 1.1, 1.3])
    curve.refine(1, 40.0)
    for _ in range(20):
        curve.refine(2, 1.1)
    assert curve.at(1) <= curve.at(2) * 1.001


def test_sizes_to_measure_rise_to_the_largest() -> None:
    sizes = measured_sizes(100)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, 100)


def test_measuring_stops_when_its_time_is_used_up() -> None:
    asked: list[int] = []

    def measure(size: int) -> float:
        asked.append(size)
        return 1.0

    curve = measure_curve(measure, max_tokens=512, budget_s=10.0)
    assert max(asked) < 512
    assert curve.at(512) > 0


def test_times_are_measured_once_and_again_when_the_file_is_damaged(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure(size: int) -> float:
        calls.append(size)
        return 1e-3 * (1 + size / 100)

    def load(key: str = "machine | model") -> PassTimes:
        return load_or_measure(key, tmp_path, max_tokens=16, measure_target=measure)

    first = load()
    num_calls = len(calls)
    assert load().target_s(7) == pytest.approx(first.target_s(7))
    assert len(calls) == num_calls
    load("another machine | model")
    assert len(calls) == 2 * num_calls
    for path in tmp_path.rglob("*.json"):
        path.write_text("{ not json")
    load()
    assert len(calls) == 3 * num_calls


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    times = load_or_measure("key", blocked, max_tokens=4, measure_target=lambda size: 1e-3 * size)
    assert times.target_s(4) > times.target_s(1)


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"target": {"tokens": [1], "seconds": []}, "head": None, "context_s": 0.0},
        {"target": {"tokens": [2, 1], "seconds": [1.0, 1.0]}, "head": None, "context_s": 0.0},
        {"target": {"tokens": [1], "seconds": [-1.0]}, "head": None, "context_s": 0.0},
        {"target": {"tokens": [1], "seconds": [1.0]}, "head": None, "context_s": -1.0},
        {"target": {"tokens": ["a"], "seconds": [1.0]}, "head": None, "context_s": 0.0},
    ],
)
def test_documents_that_are_no_pass_times_are_refused(document: object) -> None:
    with pytest.raises(ArtifactError):
        PassTimes.from_json(document)


def test_documents_round_trip() -> None:
    times = PassTimes(PassCurve([1, 4], [1.0, 2.0]), PassCurve([1, 4], [0.1, 0.2]), context_s=0.5)
    again = PassTimes.from_json(json.loads(json.dumps(times.to_json())))
    assert again.target_s(3, 2) == times.target_s(3, 2)
    assert again.head_s(3) == times.head_s(3)


def test_sizes_beyond_the_measured_ones_answer_for_themselves() -> None:
    curve = PassCurve([1, 256, 512], [4.0, 8.0, 14.0])
    assert (curve.at(768), curve.at(1024)) == pytest.approx((20.0, 26.0))
    for _ in range(60):
        curve.refine(1024, 36.0)
        curve.refine(512, 14.0)
    assert curve.at(1024) == pytest.approx(36.0, rel=0.05)
    assert curve.at(512) == pytest.approx(14.0, rel=0.05)


def test_sizes_never_seen_go_with_the_largest_that_was() -> None:
    curve = PassCurve([1, 256, 512], [4.0, 8.0, 14.0])
    for _ in range(60):
        curve.refine(512, 17.5)
    assert curve.at(1024) == pytest.approx(1.25 * 26.0, rel=0.05)
