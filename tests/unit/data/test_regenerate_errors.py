"""What goes wrong with a URL, and what the user reads about it."""

import json
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    FetchError,
    MismatchError,
    RequestError,
)
from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.chat_api import read_reply
from fledge.data.regenerate.endpoint import Endpoint, read_api_key
from fledge.data.regenerate.failures import Backoff, BadDocument, explain_status, retry_after_s
from fledge.data.regenerate.url_answerer import find_model
from fledge.store.manifest import read_manifest
from fledge.store.rows import read_rows
from tests.unit.data.flaky_server import FlakyServer, Request, Response
from tests.unit.data.regenerate_support import (
    FAST,
    TOOLS,
    ask,
    make_source,
    row,
    say,
    simple_rows,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "c", simple_rows(30))


def closed_url() -> str:
    """Where nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def test_nobody_listens(source: Path, tmp_path: Path) -> None:
    url = closed_url()
    words = rf"{url}/v1/chat/completions: connection refused \(3 attempts\). 0 of 30 rows are"
    with pytest.raises(FetchError, match=words):
        ask(source, tmp_path / "out", url, retries=2)
    with FlakyServer() as server:
        assert ask(source, tmp_path / "out", server.url).counts["rows"] == 30


def test_no_model_is_found() -> None:
    settings, silent = RegenerateSettings(retries=1), SilentProgress()
    url = closed_url()
    with pytest.raises(
        FetchError, match=rf"no answer from {url}/v1/models: connection refused \(2 att"
    ):
        find_model(Endpoint.parse(url), settings, silent, FAST)
    with FlakyServer(models=("first", "second")) as server:
        assert find_model(Endpoint.parse(server.url), settings, silent, FAST) == "first"
    with FlakyServer(models=()) as server, pytest.raises(ConfigError, match="lists no model; name"):
        find_model(Endpoint.parse(server.url), settings, silent, FAST)


def test_no_such_host() -> None:
    endpoint = Endpoint.parse("http://nowhere.invalid")
    with pytest.raises(FetchError, match="http://nowhere.invalid/v1/models: no such host"):
        find_model(endpoint, RegenerateSettings(retries=0), SilentProgress(), FAST)


def test_the_key_is_sent_and_never_shown(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FlakyServer(api_key="sk-right") as server:
        with pytest.raises(ConfigError, match=r"refused the key \(401: wrong key: Bearer \*\*\*\)"):
            ask(source, out, server.url, api_key="sk-wrong")
        with pytest.raises(ConfigError, match="refused the key"):
            ask(source, out, server.url)
        assert server.asked.total() == 0
        ask(source, out, server.url, api_key="sk-right")
    assert all(b"sk-right" not in path.read_bytes() for path in out.iterdir())
    assert "sk-right" not in repr(Endpoint.parse("http://x", "sk-right"))


def test_an_unknown_model_stops_at_once(source: Path, tmp_path: Path) -> None:
    words = r"answered 404: The model `other` does not exist. Check --url and --model; .*/v1/models"
    with FlakyServer() as server, pytest.raises(ConfigError, match=words):
        ask(source, tmp_path / "out", server.url, model="other")


def test_a_redirect_stops_at_once(source: Path, tmp_path: Path) -> None:
    class Moved(FlakyServer):
        async def route(self, request: Request) -> Response:
            return Response(308, {}, {"Location": "https://elsewhere/v1"})

    words = "answered 308, a redirect to https://elsewhere/v1"
    with Moved() as server, pytest.raises(ConfigError, match=words):
        ask(source, tmp_path / "out", server.url)


def test_refused_rows_are_left_out_and_asked_again_by_the_next_run(tmp_path: Path) -> None:
    rows = simple_rows(30)
    rows[3] = row(4, say("user", "too long [refuse]"))
    source, out = make_source(tmp_path / "c", rows), tmp_path / "out"
    with FlakyServer() as server:
        manifest = ask(source, out, server.url)
    assert (manifest.counts["rows"], manifest.counts["failed"]) == (29, 1)
    assert "failed.jsonl" in read_manifest(out).files
    assert json.loads((out / "failed.jsonl").read_bytes()) == {
        "id": "chat/4",
        "reason": "400: this model's maximum context length is 64 tokens",
    }
    assert "chat/4" not in [one.id for one in read_rows(out)]


@pytest.mark.parametrize(("count", "words"), [(40, "the first 16 rows"), (3, "the first 3 rows")])
def test_a_server_that_refuses_everything(count: int, words: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(count, "[refuse]"))
    out = tmp_path / "out"
    with FlakyServer() as server:
        with pytest.raises(RequestError, match=f"{words} got no answer, so something is wrong"):
            ask(source, out, server.url, concurrency=1)
        assert server.asked.total() <= 17
        server.is_strict = False
        assert ask(source, out, server.url).counts["rows"] == count


def test_rows_without_an_answer_stop_the_run_at_its_end(tmp_path: Path) -> None:
    rows = [*simple_rows(20), row(21, say("user", "[poison]"))]
    source, out = make_source(tmp_path / "c", rows), tmp_path / "out"
    with FlakyServer() as server:
        words = r"500: worker died \(2 attempts\). 20 of 21 rows are answered and kept"
        with pytest.raises(FetchError, match=words):
            ask(source, out, server.url, retries=1)
        # Two attempts in each of two rounds: it had another chance when the others were done.
        assert max(server.asked.values()) == 4
        assert server.answered.total() == 20
        manifest = ask(source, out, server.url, retries=1, give_up=True)
        assert server.answered.total() == 20
    assert (manifest.counts["rows"], manifest.counts["failed"]) == (20, 1)
    assert b"500: worker died" in (out / "failed.jsonl").read_bytes()


def test_many_rows_without_an_answer_can_be_given_up(tmp_path: Path) -> None:
    poison = [row(n, say("user", f"[poison] {n}")) for n in range(3, 12)]
    source, out = make_source(tmp_path / "c", [*simple_rows(2), *poison]), tmp_path / "out"
    with FlakyServer() as server:
        with pytest.raises(FetchError, match="worker died"):
            ask(source, out, server.url, retries=0, concurrency=1)
        manifest = ask(source, out, server.url, retries=0, concurrency=1, give_up=True)
    assert (manifest.counts["rows"], manifest.counts["failed"]) == (2, 9)


def test_giving_up_needs_a_server(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(9))
    with pytest.raises(FetchError, match=r"connection refused \(1 attempt\)"):
        ask(source, tmp_path / "out", closed_url(), retries=0, give_up=True)
    few = make_source(tmp_path / "few", simple_rows(2))
    with pytest.raises(FetchError, match=r"connection refused \(1 attempt\)"):
        ask(few, tmp_path / "out2", closed_url(), retries=0, give_up=True)


def test_the_user_hears_of_failures(source: Path, tmp_path: Path) -> None:
    notes: list[str] = []

    class Listening(SilentProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    with FlakyServer(faults=("503",), max_faults=1) as server:
        ask(source, tmp_path / "out", server.url, progress=Listening())
    assert len(notes) == 1
    assert notes[0].startswith("a call failed and will be tried again; the last: http://127.0.0.1:")
    assert notes[0].endswith("/v1/chat/completions: 503: not now")


def test_wrong_inputs(tmp_path: Path) -> None:
    url = closed_url()
    with pytest.raises(ArtifactError, match="there is no directory .*nowhere"):
        ask(tmp_path / "nowhere", tmp_path / "out", url)
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="is a file; give a directory that `fledge prepare` made"):
        ask(tmp_path / "rows.jsonl", tmp_path / "out", url)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="has no manifest.json"):
        ask(tmp_path / "empty", tmp_path / "out", url)
    source = make_source(tmp_path / "c", simple_rows(2))
    with FlakyServer() as server:
        ask(source, tmp_path / "answers", server.url)
    with pytest.raises(
        MismatchError, match="answers holds answers, not conversations; give a directory"
    ):
        ask(tmp_path / "answers", tmp_path / "out", url)
    assert not (tmp_path / "out").exists()


def test_rows_that_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(50))
    path = source / "rows-00001.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"user", b"uses", 1))
    with pytest.raises(ArtifactError, match=r"rows-00001.jsonl was changed after it was made; rem"):
        ask(source, tmp_path / "out", closed_url())
    path.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"rows-00001.jsonl is \d+ bytes long, and the"):
        ask(source, tmp_path / "out", closed_url())
    path.unlink()
    with pytest.raises(ArtifactError, match=r"rows-00001.jsonl is missing"):
        ask(source, tmp_path / "out", closed_url())
    path.write_bytes(content)
    (source / "rows-00009.jsonl").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"rows-00009.jsonl is not in the manifest"):
        ask(source, tmp_path / "out", closed_url())


def test_a_run_without_answers_may_begin_otherwise(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FlakyServer() as server:
        with pytest.raises(FetchError, match="connection refused"):
            ask(source, out, closed_url(), retries=0, model="mistyped")
        assert ask(source, out, server.url).plan.identity == {"model": "tiny"}
        with pytest.raises(MismatchError, match="identity.model = 'tiny', and this run has"):
            ask(source, out, server.url, model="other")


def test_too_little_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fledge.store.capacity.free_bytes", lambda path: 1000)
    with pytest.raises(CapacityError, match="not enough disk space for the answers in .*out"):
        ask(source, tmp_path / "out", closed_url())


def test_raw_text_is_continued(tmp_path: Path) -> None:
    rows = [row(1, say("user", "once upon")), row(2, say("system", "x"), say("user", "y"))]
    with FlakyServer() as server:
        manifest = ask(make_source(tmp_path / "c", rows), tmp_path / "out", server.url, raw=True)
        (body,) = server.bodies.values()
    assert body["prompt"] == "once upon"
    assert (manifest.counts["rows"], manifest.counts["failed"]) == (1, 1)
    assert (
        b"only a single user message can be continued"
        in (tmp_path / "out" / "failed.jsonl").read_bytes()
    )


def test_what_is_asked_and_what_is_kept(tmp_path: Path) -> None:
    rows = [
        row(1, say("system", "s"), say("user", "[think]"), say("assistant", "old"), tools=TOOLS),
        row(2, say("user", "[call weather][call clock]"), tools=TOOLS),
        row(3, say("user", "[reason]")),
        row(4, say("user", "[long]")),
        row(5, say("user", "[filter]")),
        row(6, say("system", "no question")),
    ]
    with FlakyServer() as server:
        options: dict[str, Any] = {"temperatures": (0.7,), "top_p": 0.9, "max_tokens": 77}
        manifest = ask(
            make_source(tmp_path / "c", rows),
            tmp_path / "out",
            server.url,
            keep_truncated=False,
            **options,
        )
        body = next(one for one in server.bodies.values() if len(one["messages"]) == 2)
    first, second, third = read_rows(tmp_path / "out")
    assert body == {
        "model": "tiny",
        "messages": list(rows[0].messages[:2]),
        "tools": list(TOOLS),
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 77,
        "seed": first.answers[0].seed,
    }
    assert first.messages[-1]["reasoning_content"].startswith("thinking about ")
    assert third.messages[-1]["reasoning_content"].startswith("reasoning about ")
    assert [one["function"]["name"] for one in second.messages[-1]["tool_calls"]] == [
        "weather",
        "clock",
    ]
    assert second.messages[-1]["content"] is None
    assert set(second.messages[-1]["tool_calls"][0]) == {"id", "type", "function"}
    (answer,) = second.answers
    assert (answer.finish_reason, answer.model, answer.temperature) == ("tool_calls", "tiny", 0.7)
    assert manifest.counts == {
        "rows_in": 6,
        "rows": 3,
        "failed": 0,
        "answers": 3,
        "cut_short": 0,
        "dropped": {"content_filter": 1, "nothing to ask": 1, "truncated": 1},
        "finish_reasons": {"stop": 2, "tool_calls": 1},
        "temperatures": {"0.7": 3},
    }


BAD_URLS = {
    "localhost:8000": "is not a URL; it must be like http://localhost:8000/v1",
    "ftp://x/v1": "is not a URL; it must be like",
    "http://": "is not a URL; it must be like",
    "http://x:99999": "is not a URL: Port out of range",
    "http://x y/": "is not a URL",
    "http://me:secret@x/v1": "holds a user name or password; leave it out",
    "http://x/v1?key=1": "has a query or a fragment",
}


@pytest.mark.parametrize(("typed", "words"), BAD_URLS.items())
def test_urls_that_are_none(typed: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Endpoint.parse(typed)
    assert "secret" not in str(caught.value)


def test_urls_as_people_write_them() -> None:
    for typed in ("http://h:1", "http://h:1/", "http://h:1/v1/", "http://h:1/v1/chat/completions"):
        assert Endpoint.parse(typed).url == "http://h:1/v1"
    assert Endpoint.parse("https://[::1]/api").url == "https://[::1]/api"
    assert Endpoint.parse("https://[::1]/api").is_loopback
    assert Endpoint.parse("http://localhost").is_loopback
    assert not Endpoint.parse("https://example.org").is_loopback


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("OPENAI_API_KEY", " sk-1\n")
    monkeypatch.setenv("OTHER", "schlüssel")
    assert read_api_key(None) == "sk-1"
    with pytest.raises(ConfigError, match="--api-key-env names MINE, which is not set or empty"):
        read_api_key("MINE")
    with pytest.raises(ConfigError, match="the key in OTHER holds characters that no HTTP header"):
        read_api_key("OTHER")


def test_pauses() -> None:
    backoff = Backoff(first_s=1.0, longest_s=8.0)
    for num_failures, pause_s in ((1, 1), (2, 2), (3, 4), (4, 8), (40, 8)):
        for _ in range(20):
            assert pause_s <= backoff.pause_s(num_failures) <= pause_s * 1.5
    assert 30 <= backoff.pause_s(1, retry_after_s=30) <= 30.5
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    assert 15 < retry_after_s(soon) <= 20
    cases = {"3": 3.0, "0.5": 0.5, "-1": 0.0, "": 0.0, "soon": 0.0, "nan": 0.0, "999999": 3600.0}
    assert {header: retry_after_s(header) for header in cases} == cases


def test_retry_after_is_obeyed(source: Path, tmp_path: Path) -> None:
    class Full(FlakyServer):
        async def route(self, request: Request) -> Response:
            if not self.timeline[1:]:
                return Response(429, {"error": "full"}, {"Retry-After": "0.7"})
            return await super().route(request)

    started = time.monotonic()
    with Full() as server:
        ask(make_source(tmp_path / "one", simple_rows(1)), tmp_path / "out", server.url)
    assert time.monotonic() - started > 0.7


def test_reasons_are_one_safe_line() -> None:
    assert explain_status(400, '{"error": {"message": "no\\n\\u001b[31mway"}}') == "400: no [31mway"
    assert explain_status(422, '{"detail": "bad."}') == "422: bad"
    assert explain_status(500, '{"error": "bad"}') == "500: bad"
    assert explain_status(502, "<html>" + "x" * 900) == "502: <html>" + "x" * 294
    assert explain_status(502, "") == "502"


BAD_DOCUMENTS: dict[str, Any] = {
    "no choices": [],
    "no choices in": {"choices": []},
    "finish_reason 'abort'": {"choices": [{"finish_reason": "abort"}]},
    "neither a message nor": {"choices": [{"finish_reason": "stop"}]},
    "a message that is no": {"choices": [{"finish_reason": "stop", "message": "x"}]},
    "a content that is": {"choices": [{"finish_reason": "stop", "message": {"content": 1}}]},
    "a tool call without": {
        "choices": [{"finish_reason": "stop", "message": {"tool_calls": [{}]}}]
    },
}


@pytest.mark.parametrize(("words", "document"), BAD_DOCUMENTS.items())
def test_documents_that_make_no_sense(words: str, document: Any) -> None:
    with pytest.raises(BadDocument, match=words):
        read_reply(document)


def test_contents_in_parts_and_empty_ones() -> None:
    def read(message: dict[str, Any]) -> Any:
        choice = {"finish_reason": "eos_token", "message": message}
        return read_reply({"choices": [choice]}).message

    assert read({"content": [{"type": "text", "text": "a"}, {"text": "b"}]})["content"] == "ab"
    assert read({"content": None})["content"] == ""
    call = {"function": {"name": "f", "arguments": None}}
    assert read({"content": None, "tool_calls": [call]}) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
