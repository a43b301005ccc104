"""Through a URL: a server that fails in every way changes nothing but the time."""

from pathlib import Path

import pytest

from fledge.store.rows import read_rows
from tests.unit.data.flaky_server import ALL_FAULTS, FlakyServer
from tests.unit.data.regenerate_support import (
    ask,
    make_source,
    mixed_rows,
    output_bytes,
    simple_rows,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("turns", [pytest.param("last", marks=pytest.mark.slow), "all"])
def test_failures_leave_no_trace(turns: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "conversations", mixed_rows(100))
    with FlakyServer() as server:
        calm = ask(source, tmp_path / "calm", server.url, turns=turns)
        assert not server.faults_met
    with FlakyServer(faults=ALL_FAULTS, service_s=(0.0, 0.02)) as server:
        # Long enough that a busy machine does not lose answers to the clock.
        out = tmp_path / "flaky"
        flaky = ask(source, out, server.url, turns=turns, concurrency=32, timeout_s=3.0)
        assert set(server.faults_met) == set(ALL_FAULTS)
        assert set(server.answered.values()) == {1}
    assert flaky.fingerprint == calm.fingerprint
    assert output_bytes(tmp_path / "flaky") == output_bytes(tmp_path / "calm")
    assert names(tmp_path / "flaky") == [
        ".lock",
        "card.json",
        "card.md",
        "manifest.json",
        "plan.json",
        "rows-00000.jsonl",
    ]
    assert calm.counts["rows"] == 100
    assert [row.id for row in read_rows(tmp_path / "flaky")] == [f"chat/{n}" for n in range(1, 101)]


def test_requests_in_flight_reach_the_limit_and_stay_below_it(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(60))
    with FlakyServer(faults=("500", "torn"), max_faults=1, service_s=(0.05, 0.05)) as server:
        ask(source, tmp_path / "out", server.url, concurrency=12)
    assert max(in_flight for _, in_flight in server.timeline) == 12
