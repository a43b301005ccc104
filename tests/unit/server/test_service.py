"""Keys, limits, figures and the application around an engine that is not there (yet)."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge import EngineSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.server_settings import ServeSettings
from fledge.server.answers import Answers
from fledge.server.api_errors import BusyError, UnavailableError
from fledge.server.api_keys import KEYS_VARIABLE, ApiKeys
from fledge.server.app import make_app
from fledge.server.figures import speculation
from fledge.server.logs import JsonFormatter
from fledge.server.service import Service, default_model_name
from fledge.server.serving import is_loopback, make_server
from fledge.server.wire import EngineChoice, EngineFacts
from tests.unit.server.made_up import STATS

CHOICE = EngineChoice(
    target="some-target", head=None, dtype="auto", device="cpu", settings=EngineSettings()
)
FACTS = EngineFacts(
    process_id=1,
    target_dir=Path(),
    device="cpu",
    dtype="float32",
    context_len=100,
    max_tokens=100,
    max_requests=4,
    settings=EngineSettings(max_requests=4),
)


def ask(work: Callable[[httpx.AsyncClient, Service], Awaitable[Any]], **settings: Any) -> None:
    """Let `work` ask an application whose engine is never started."""

    async def run() -> None:
        service = Service(CHOICE, ServeSettings(**settings))
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await work(client, service)

    asyncio.run(run())


def test_before_the_engine_is_ready() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        assert (await client.get("/health")).json() == {"status": "ok", "engine": "loading"}
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        body = {"model": "some-target", "messages": [{"role": "user", "content": "x"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "it is loading" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        assert "stats" not in (await client.get("/v1/speculation")).json()
        service.is_draining = True
        assert (await client.get("/ready")).json() == {"status": "draining"}
        assert "shutting down" in (await client.post("/tokenize", json={"prompt": "x"})).text

    ask(work)


def test_web_pages_of_named_origins_may_ask() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del service
        for origin, allowed in (("http://mine", "http://mine"), ("http://other", None)):
            answer = await client.get("/v1/models", headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed

    ask(work, cors_origins=("http://mine",))


def test_an_unexpected_error_is_one_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Service) -> str:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(Service, "status", property(fail))

    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del service
        answer = await client.get("/health")
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text

    ask(work)
    assert "a request failed" in caplog.text


def test_limits() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del client
        service.supervisor.facts = FACTS
        service.note_duration(31.0)
        with service.admit(6):
            with service.admit(2):
                pass
            with pytest.raises(BusyError, match="6 answers are being made or wait") as caught:
                service.admit(3).__enter__()
            assert caught.value.retry_after_s == 4
        with service.admit(8):
            pass

    ask(work, max_queue=4)


def test_what_does_not_finish_in_time_is_told_so() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del client
        server = make_server(service)
        answers = Answers(range(1), lambda _: None)
        service.supervisor._waiting[0] = answers
        service.num_open = 1
        server.drain("SIGTERM")
        with pytest.raises(UnavailableError, match="shutting down and could not finish"):
            await answers.take()
        assert server.should_exit
        assert not server.force_exit
        server.handle_exit(signal.SIGTERM, None)
        assert server.force_exit, "the second signal does not wait"

    ask(work, drain_s=0.0)


def test_keys_of_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fledge.server.api_keys._CHECK_S", 0.0)
    monkeypatch.setenv(KEYS_VARIABLE, "env-1, env-2")
    file = tmp_path / "keys"
    file.write_text("# comment\nfile-1\n", encoding="utf-8")
    keys = ApiKeys(file)
    assert keys.are_needed
    assert all(keys.find(key) for key in ("env-1", "env-2", "file-1"))
    assert not any(keys.find(key) for key in ("", "# comment", "file-2", "env-1, env-2"))
    file.write_text("file-2\n", encoding="utf-8")
    os.utime(file, ns=(1, 1))
    assert keys.find("file-2")
    assert not keys.find("file-1")
    file.unlink()
    assert keys.find("file-2")
    assert "the API keys stay as they are" in caplog.text
    monkeypatch.delenv(KEYS_VARIABLE)
    assert not ApiKeys(None).are_needed
    file.write_text("# none\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no API key"):
        ApiKeys(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "port is -1"),
        ({"max_choices": 0}, "max_choices is 0; it must be at least 1"),
        ({"max_queue": -1}, "max_queue is -1; it must be 0 or positive"),
        ({"request_timeout_s": 0.0}, "request_timeout_s is 0.0; it must be positive"),
        ({"drain_s": -1.0}, "drain_s is -1.0"),
        ({"model_names": ("",)}, "a model name is empty"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeSettings(**settings)


def test_figures_of_several_answers() -> None:
    figures = speculation([STATS, STATS])
    assert figures["accept_length"] == 2.0
    assert figures["tokens_per_s"] == 4.5
    assert (figures["offered_at_depth"], figures["accepted_at_depth"]) == ([8, 6], [6, 2])
    assert speculation([])["accept_length"] is None


def test_log_lines() -> None:
    record = logging.LogRecord("fledge", logging.INFO, "", 0, "said %s", ("ü",), None)
    record.fields = {"status": 200}
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["status"], line["level"]) == ("said ü", 200, "info")
    assert line["time"].endswith("+00:00")


def test_names(tmp_path: Path) -> None:
    assert default_model_name("owner/model") == "owner/model"
    assert default_model_name(str(tmp_path)) == tmp_path.name
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
