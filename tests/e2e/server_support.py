"""A real server on a free port, in a thread of this process; its engine has its own process."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from fledge.contracts.batch_settings import BatchSettings
from fledge.contracts.server_settings import ServeSettings
from fledge.contracts.settings import EngineSettings
from fledge.server.service import Service
from fledge.server.serving import make_server, open_socket
from fledge.server.wire import EngineChoice
from tests.warm_programs import WarmPrograms

MODEL = "tiny"
KEY, OTHER_KEY = "first-key", "second-key"
KEYS_FILE = f"# ours\n{KEY}\n\n{OTHER_KEY}\n"
CLIENT_TIMEOUT_S = 2.0
PATIENCE_S = 90.0


def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


class RunningServer:
    """A server that is ready."""

    def __init__(self, service: Service, port: int, key: str) -> None:
        self.service = service
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S
        )
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S
        )
        self.key = key

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=PATIENCE_S
        )

    def post(self, path: str, document: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=document)

    def complete(self, **fields: Any) -> httpx.Response:
        """A completion of a short prompt."""
        return self.post("/v1/completions", {"model": MODEL, "prompt": "Go on", **fields})

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Iterator[Any]]:
        """The events of a completion, as JSON, or as text where they are none."""
        body = {"model": MODEL, "prompt": "Go on", "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield (_event(line) for line in response.iter_lines() if line.startswith("data: "))

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/v1/speculation").json()["stats"]
        return found

    def wait_until_idle(self) -> None:
        wait_until(
            lambda: self.stats()["num_running"] + self.stats()["num_waiting"] == 0,
            "the engine is idle",
        )

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.http.get("/ready").status_code == 200, "the server is ready")


def _event(line: str) -> Any:
    text = line.removeprefix("data: ")
    return text if text == "[DONE]" else json.loads(text)


def start_engines_warm(patch: pytest.MonkeyPatch, warm: WarmPrograms) -> None:
    """Engine processes are still processes of their own, without the seconds of their imports."""
    starting = SimpleNamespace(**{**vars(subprocess), "Popen": warm.start})
    patch.setattr("fledge.server.engine_link.subprocess", starting)


@contextmanager
def running_server(
    target: Path,
    head: Path | None = None,
    *,
    cache: Path,
    engine: EngineSettings,
    warm: WarmPrograms | None = None,
    key: str = "none",
    **settings: Any,
) -> Iterator[RunningServer]:
    """A ready server; its engine runs on one thread and has a cache of its own."""
    choice = EngineChoice(
        target=str(target), head=head, dtype="auto", device="cpu", settings=engine
    )
    batches = settings.pop("batches", None) or BatchSettings(directory=str(cache / "batches"))
    service_settings = ServeSettings(port=0, model_names=(MODEL,), batches=batches, **settings)
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(cache))
        patch.setenv("OMP_NUM_THREADS", "1")
        if warm is not None:
            start_engines_warm(patch, warm)
        service = Service(choice, service_settings)
        service.open_batches()
        announced: list[str] = []
        server = make_server(service, lambda: announced.append(service.supervisor.state))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            running = RunningServer(service, port, key)
            with running.http, running.openai:
                running.wait_until_ready()
                yield running
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert announced == ["ready"], "it is said once, when the engine can be asked"
    assert service.supervisor.state == "stopped"
    assert not is_running(service)


@contextmanager
def altered(server: RunningServer, **settings: Any) -> Iterator[None]:
    """Other limits for a while."""
    before = server.service.settings
    server.service.settings = replace(before, **settings)
    try:
        yield
    finally:
        server.service.settings = before


def is_running(service: Service) -> bool:
    """Whether the engine process is still there."""
    facts = service.supervisor.facts
    return facts is not None and os.path.exists(f"/proc/{facts.process_id}/exe")  # noqa: PTH110
