"""Through the Batch API: every row is in one batch at a time, whatever happens to us or to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ConfigError, FetchError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.batch_answerer import BatchAnswerer, Polling
from fledge.data.regenerate.batch_files import FileLimits
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.stage import regenerate
from fledge.store.manifest import Manifest
from tests.unit.data.batch_server import BatchServer
from tests.unit.data.flaky_server import FlakyServer, Request, Response, error
from tests.unit.data.regenerate_support import (
    FAST,
    ask,
    make_source,
    mixed_rows,
    output_bytes,
    row,
    say,
    simple_rows,
)

QUICK = Polling(first_s=0.01, longest_s=0.05)


class Died(Exception):
    """The end of a process, as far as what it leaves behind is concerned."""


def ask_in_batches(
    source: Path,
    out: Path,
    url: str,
    *,
    limits: FileLimits | None = None,
    give_up: bool = False,
    **options: Any,
) -> Manifest:
    settings = RegenerateSettings(**{"timeout_s": 5.0, **options})
    endpoint, silent = Endpoint.parse(url), SilentProgress()
    answerer = BatchAnswerer(endpoint, "tiny", settings, silent, FAST, QUICK, limits)
    return regenerate(source, out, settings, answerer, progress=silent, give_up=give_up)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "conversations", mixed_rows(60))


@pytest.mark.parametrize("turns", ["last", "all"])
def test_answers_are_those_of_single_requests(turns: str, source: Path, tmp_path: Path) -> None:
    mishaps = {1: "lost answer", 2: "expired", 3: "busy", 4: "nonsense", 5: "failed"}
    with BatchServer(mishaps=mishaps) as server:
        limits = FileLimits(requests=25, num_bytes=6_000)
        batched = ask_in_batches(source, tmp_path / "b", server.url, limits=limits, turns=turns)
        assert len(server.batches) > 5
        for content in server.files.values():
            requests = [line for line in content.splitlines() if b'"method"' in line]
            assert len(requests) <= 25
            assert sum(map(len, requests)) <= 6_000
    with FlakyServer() as server:
        single = ask(source, tmp_path / "s", server.url, turns=turns)
    assert batched.fingerprint == single.fingerprint
    assert output_bytes(tmp_path / "b") == output_bytes(tmp_path / "s")
    assert not list((tmp_path / "b").glob("batch*"))


def test_nothing_is_handed_in_twice_after_a_stop(source: Path, tmp_path: Path) -> None:
    """The process dies while batches wait; the next one waits for the same batches."""
    out = tmp_path / "answers"
    with BatchServer() as server:
        server.is_held = True
        limits = FileLimits(requests=25)
        with pytest.raises(Died):
            _ask_and_die(source, out, server, limits)
        assert len(list(out.glob("batch-*.jsonl"))) == 3
        server.is_held = False
        ask_in_batches(source, out, server.url, limits=limits)
        assert len(server.batches) == 3
        assert set(server.handed_in.values()) == {1}


def _ask_and_die(source: Path, out: Path, server: BatchServer, limits: FileLimits) -> None:
    class DyingProgress(SilentProgress):
        def note(self, text: str) -> None:
            if text.startswith("batch batch_3"):
                raise Died

    settings = RegenerateSettings(timeout_s=5.0)
    endpoint, dying = Endpoint.parse(server.url), DyingProgress()
    answerer = BatchAnswerer(endpoint, "tiny", settings, dying, FAST, QUICK, limits)
    regenerate(source, out, settings, answerer, progress=dying)


@pytest.mark.parametrize("entry", ["batch_id", "is_closed"])
def test_a_kill_between_a_step_and_its_entry(entry: str, source: Path, tmp_path: Path) -> None:
    """The journal ends just before the entry, as if the process had died there."""
    out = tmp_path / "answers"
    with BatchServer() as server:
        server.is_held = True
        with pytest.raises(Died):
            _ask_and_die(source, out, server, FileLimits(requests=25))
        journal = out / "answers.journal"
        if entry == "batch_id":
            lines = journal.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if b'"batch_id"' not in line]
            assert len(kept) == len(lines) - 3
            journal.write_bytes(b"".join(kept))
        server.is_held = False
        if entry == "is_closed":
            with pytest.raises(Died):
                _die_when_closing(source, out, server)
        ask_in_batches(source, out, server.url)
        assert len(server.batches) == 3
        assert set(server.handed_in.values()) == {1}


def _die_when_closing(source: Path, out: Path, server: BatchServer) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def die(self: object, record: dict[str, Any]) -> None:
            raise Died

        patch.setattr("fledge.data.regenerate.worklist.Worklist.note_batch", die)
        ask_in_batches(source, out, server.url)


def test_rows_the_server_never_answers(tmp_path: Path) -> None:
    rows = [*simple_rows(5), row(6, say("user", "[poison]")), row(7, say("user", "[refuse]"))]
    source, out = make_source(tmp_path / "c", rows), tmp_path / "answers"
    with BatchServer() as server:
        with pytest.raises(FetchError, match=r"from batch batch_\d: 500: worker died. 5 of 7"):
            ask_in_batches(source, out, server.url)
        manifest = ask_in_batches(source, out, server.url, give_up=True)
    assert (manifest.counts["rows"], manifest.counts["failed"]) == (5, 2)
    failed = [json.loads(line) for line in (out / "failed.jsonl").read_bytes().splitlines()]
    assert [one["id"] for one in failed] == ["chat/6", "chat/7"]
    assert failed[1]["reason"] == "400: this model's maximum context length is 64 tokens"


def test_batches_that_always_fail(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(3))
    with (
        BatchServer(mishaps=dict.fromkeys(range(1, 9), "failed")) as server,
        pytest.raises(FetchError, match="enqueued token limit reached"),
    ):
        ask_in_batches(source, tmp_path / "answers", server.url)


def test_an_unknown_model_stops_at_once(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(3))
    with (
        BatchServer(models=("other",)) as server,
        pytest.raises(ConfigError, match="answered 404: The model `tiny` does not exist"),
    ):
        ask_in_batches(source, tmp_path / "answers", server.url)


def test_a_server_without_batches(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(3))
    with (
        FlakyServer() as server,
        pytest.raises(ConfigError, match=r"/v1/files answered 404: no route /v1/files"),
    ):
        ask_in_batches(source, tmp_path / "answers", server.url)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (413, r"the server refuses to take a batch \(413: no\). What was handed in is kept"),
        (502, r"no answer from http://.*/v1/files: 502: no \(2 attempts\). What was handed in"),
    ],
)
def test_a_server_that_takes_no_files(status: int, words: str, tmp_path: Path) -> None:
    class Closed(BatchServer):
        async def route(self, request: Request) -> Response:
            return error(status, "no")

    source = make_source(tmp_path / "c", simple_rows(3))
    with Closed() as server, pytest.raises(FetchError, match=words):
        ask_in_batches(source, tmp_path / "answers", server.url, retries=1)


def test_single_requests_leave_waiting_batches_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers"
    with BatchServer() as server:
        server.is_held = True
        with pytest.raises(Died):
            _ask_and_die(source, out, server, FileLimits(requests=25))
        with pytest.raises(ConfigError, match="3 batches of an earlier run with --batch are still"):
            ask(source, out, server.url)


def test_a_lost_file_of_a_waiting_batch(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers"
    with BatchServer() as server:
        server.is_held = True
        with pytest.raises(Died):
            _ask_and_die(source, out, server, FileLimits(requests=25))
        (out / "batch-00001.jsonl").unlink()
        with pytest.raises(Exception, match="a batch that is with the server needs it"):
            ask_in_batches(source, out, server.url)
