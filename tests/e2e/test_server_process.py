"""`fledge serve` as a process: what it says, how it leaves, what it will not start with."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RunProgram
from tests.e2e.server_support import PATIENCE_S, wait_until

SECRET = "a prompt that is nobody's business"


@contextmanager
def serving(program: list[str], target: Path, log: Path, *options: str) -> Iterator[Any]:
    """The program and its address, once it is ready."""
    command = [*program, "serve", "--target", str(target), "--port", "0", *options]
    with log.open("wb") as stderr:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    try:
        wait_until(lambda: "http://" in log.read_text(), "it listens")
        url = log.read_text().split("served at ")[1].split("/v1")[0]
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "it is ready")
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_it_drains_and_leaves(program: list[str], roomy_target_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--model-name", "m", "--cache-tokens", "4096", "--max-requests", "2")
    with serving(program, roomy_target_dir, log, *options) as (process, url):
        engine_id = httpx.get(f"{url}/v1/speculation").json()["engine"]["facts"]["process_id"]
        body = {"model": "m", "prompt": SECRET, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: httpx.get(f"{url}/ready").json() == {"status": "draining"}, "it drains"
            )
            refused = httpx.post(f"{url}/v1/completions", json=body)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(PATIENCE_S) == 0
        wait_until(lambda: not Path(f"/proc/{engine_id}").exists(), "the engine has gone")
    check_log(log.read_text())


def check_log(text: str) -> None:
    first, *lines = text.splitlines()
    assert first.endswith("/v1")
    entries = [json.loads(line) for line in lines]
    messages = [entry["message"] for entry in entries]
    assert any(message.startswith("the engine is ready") for message in messages)
    assert any(message.startswith("SIGTERM: taking no new requests, 1") for message in messages)
    done = next(entry for entry in entries if entry.get("completion_tokens"))
    assert (done["status"], done["completion_tokens"], done["finish_reasons"]) == (
        200,
        400,
        ["length"],
    )
    assert {"request_id", "seconds", "caller", "accept_length", "time_to_first_token_s"} <= set(
        done
    )
    assert SECRET not in text


def test_a_target_that_cannot_be_loaded(run: RunProgram, tmp_path: Path) -> None:
    result = run("serve", "--target", tmp_path / "nothing", "--port", "0")
    assert result.exit_code == 1
    assert "nothing" in result.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "serve.max_quue=1"], "did you mean `max_queue`?"),
        (["--port", "70000"], "port is 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--api-keys", "/no/such/file"], "the API keys in /no/such/file cannot be read"),
        (["--depth", "0"], "tree depth is 0"),
    ],
)
def test_wrong_options(run: RunProgram, options: list[str], message: str) -> None:
    result = run("serve", "--port", "0", *options)
    assert result.exit_code == 2
    assert message in result.error


def test_a_port_in_use(run: RunProgram) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        result = run("serve", "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.error
    assert time.monotonic() - started < 30
