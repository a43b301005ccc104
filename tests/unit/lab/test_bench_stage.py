"""The stage: order, journal, going on after a break, partial results."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.data.regenerate.endpoint import Endpoint
from fledge.lab.bench import bench, jobs_of
from fledge.lab.bench_arms import EngineChoice, UrlArm, server_arms, url_arms
from fledge.lab.bench_journal import JOURNAL_NAME
from fledge.lab.load_driver import BenchError, Driver
from fledge.store.manifest import BENCH, read_input
from tests.unit.lab.scripted_server import ScriptedServer, scripted_server

SETTINGS = BenchSettings(
    concurrency=(1, 2), requests=4, waves=1, repeats=2, prompt_len=3, max_tokens=4, warm_up=False
)


@pytest.fixture(autouse=True)
def _quick_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client costs is measured elsewhere."""
    cost = {"s_per_chunk": 1e-4, "most_chunks_per_s": 1e4, "first_token_s": 1e-3}
    monkeypatch.setattr("fledge.lab.bench.measure_client", lambda: cost)


def run(out: Path, *servers: ScriptedServer, settings: BenchSettings = SETTINGS) -> dict[str, Any]:
    arms = [
        UrlArm(name=f"s{number}", endpoint=Endpoint.parse(server.url), settings=settings)
        for number, server in enumerate(servers)
    ]
    return bench(arms, settings, out, device="cpu", progress=SilentProgress())


def test_two_servers_side_by_side(tmp_path: Path) -> None:
    with scripted_server() as one, scripted_server(tokens_per_chunk=2) as other:
        document = run(tmp_path / "out", one, other)
        again = run(tmp_path / "out", one, other)
        # A probe, then four requests for each load and repeat; nothing when all is there.
        assert one.script.num_asked == other.script.num_asked == 1 + 4 * 4
        sent = [[body["messages"] for body in s.script.bodies[1:]] for s in (one, other)]
    assert sorted(map(str, sent[0])) == sorted(map(str, sent[1]))
    assert again == document == json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(row["arm"], row["level"], row["repeats"]) for row in document["rows"]] == [
        ("s0", 1, 2),
        ("s0", 2, 2),
        ("s1", 1, 2),
        ("s1", 2, 2),
    ]
    assert document["is_complete"]
    assert document["comparisons"][0]["crossover"]["from"] == 1
    assert document["arms"][0]["tokens"] == "usage"
    manifest = read_input(tmp_path / "out", BENCH)
    assert manifest.counts["requests"] == 32


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with scripted_server(dies_at=7) as server:
        url = server.url
        with pytest.raises(BenchError) as error:
            run(out, server)
        # Of the two answers under way when it died, any number may have come to their end.
        said = r"the server of s0, 2 at once does not answer any more, after [012] good answers"
        assert re.match(said, str(error.value))
        assert f"What was measured is in {out / 'bench.json'}; the same command" in str(error.value)
    document = json.loads((out / "bench.json").read_text())
    assert not document["is_complete"]
    whole, broken = document["rows"]
    assert (whole["level"], whole["good"], whole["lost"]) == (1, 4, None)
    assert broken["level"] == 2
    assert broken["good"] <= 2
    assert broken["lost"] is not None
    with pytest.raises(ArtifactError, match=r"has no manifest\.json: it is unfinished"):
        read_input(out, BENCH)
    with scripted_server() as server:
        moved = BenchSettings(**{**_fields(SETTINGS), "requests": 5})
        with pytest.raises(MismatchError, match=r"settings\.requests = 4, and this run has"):
            _run_at(url, server, out, moved)
        document = _run_at(url, server, out, SETTINGS)
        # What was whole is not measured again.
        assert server.script.num_asked == 1 + 3 * 4
    assert document["is_complete"]
    assert all(row["lost"] is None for row in document["rows"])


def _run_at(url: str, server: ScriptedServer, out: Path, settings: BenchSettings) -> dict[str, Any]:
    """The same address, behind which there is another server now."""

    class Moved(UrlArm):
        @property
        def identity(self) -> dict[str, Any]:
            return {"url": url, "model": None}

    arm = Moved(name="s0", endpoint=Endpoint.parse(server.url), settings=settings)
    return bench([arm], settings, out, device="cpu", progress=SilentProgress())


def _fields(settings: BenchSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__slots__}


def test_no_success_at_all(tmp_path: Path) -> None:
    statuses = dict.fromkeys(range(1, 100), 500)
    with scripted_server(status_at=statuses) as server, pytest.raises(BenchError) as error:
        run(tmp_path / "out", server)
    assert str(error.value).startswith(
        "none of 4 requests succeeded (s0, 1 at once): 4 x http 500 (500: no, that is 500). What"
    )
    row = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"][0]
    assert row["errors"]["http 500"]["count"] == 4


def test_a_server_that_was_not_there_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    with scripted_server() as server:
        away = UrlArm(name="s0", endpoint=Endpoint.parse("http://127.0.0.1:9"), settings=SETTINGS)
        with pytest.raises(ConfigError, match="cannot be reached"):
            bench([away], SETTINGS, tmp_path / "out", device="cpu", progress=SilentProgress())
        fewer = replace(SETTINGS, concurrency=(1,), repeats=1)
        assert run(tmp_path / "out", server, settings=fewer)["is_complete"]
        with pytest.raises(MismatchError, match="choose another directory"):
            run(tmp_path / "out", server)


def test_a_full_server_is_a_result(tmp_path: Path) -> None:
    statuses = dict.fromkeys(range(5, 9), 429)
    settings = BenchSettings(**{**_fields(SETTINGS), "repeats": 1})
    with scripted_server(status_at=statuses) as server:
        document = run(tmp_path / "out", server, settings=settings)
    full = document["rows"][1]
    assert (full["good"], full["errors"]["busy"]["count"], full["ttft_s"]) == (0, 4, None)


def test_a_torn_line_is_cut_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with scripted_server(dies_at=6) as server:
        with pytest.raises(BenchError):
            run(out, server)
        journal = out / JOURNAL_NAME
        content = journal.read_bytes()
        journal.write_bytes(content + b'{"arm": "s0", "po')
        # The server has gone: what was read back is what was there before.
        with pytest.raises(ConfigError, match="cannot be reached"):
            run(out, server)
        assert journal.read_bytes() == content
        journal.write_bytes(b"[]\n" + content)
        with pytest.raises(ArtifactError, match=r"line 1 is damaged; remove the line"):
            run(out, server)


def test_arms_take_turns(tmp_path: Path) -> None:
    urls = url_arms(["a=http://x", "http://y/v1"], SETTINGS)
    assert [arm.name for arm in urls] == ["a", "server 2"]
    order = [(job.arm.name[0], job.point.users, job.repeat) for job in jobs_of(urls, SETTINGS)]
    assert order[:4] == [("a", 1, 0), ("s", 1, 0), ("s", 2, 0), ("a", 2, 0)]
    choice = EngineChoice(
        target="t", head=tmp_path, dtype="auto", device="cpu", engine=_engine_settings()
    )
    own = server_arms(choice, SETTINGS)
    order = [(job.arm.name, job.point.users, job.repeat) for job in jobs_of(own, SETTINGS)]
    assert [name for name, *_ in order] == ["head"] * 2 + ["plain"] * 4 + ["head"] * 2
    assert own[0].choice.serve_options[-2:] == ["--head", "none"]
    assert own[1].choice.serve_options[-2:] == ["--head", str(tmp_path)]
    with pytest.raises(ConfigError, match="two arms have the same name: a, a; name them NAME=URL"):
        bench(
            url_arms(["a=http://x", "a=http://y"], SETTINGS),
            SETTINGS,
            tmp_path / "o",
            device="cpu",
            progress=SilentProgress(),
        )


def test_what_has_to_be_started_is_started_for_every_repeat(tmp_path: Path) -> None:
    """The prompts of an earlier repeat would be in the cache of one that goes on."""
    opened: list[str] = []

    class StartedArm(UrlArm):
        is_quick_to_open = False

        @contextmanager
        def opened(self, progress: Progress) -> Iterator[Driver]:
            opened.append(self.name)
            with super().opened(progress) as driver:
                yield driver

    with scripted_server() as server:
        endpoint = Endpoint.parse(server.url)
        arms = [StartedArm(name=name, endpoint=endpoint, settings=SETTINGS) for name in ("a", "b")]
        bench(arms, SETTINGS, tmp_path / "o", device="cpu", progress=SilentProgress())
    assert opened == ["b", "a", "a", "b"]


def _engine_settings() -> Any:
    from fledge.contracts.settings import EngineSettings

    return EngineSettings()
