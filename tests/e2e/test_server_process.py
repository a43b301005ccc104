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
from tests.e2e.server_support import PATIENCE_S, start_engines_warm, wait_until
from tests.warm_programs import WarmPrograms

SECRET = "a prompt that is nobody's business"
LINE_TOKENS = [4, 4, 4, 4, 80, 80, 80]
"""Of the lines of a batch: some are soon finished, some are not when the server is killed."""


@contextmanager
def serving(program: list[str], target: Path, log: Path, *options: str) -> Iterator[Any]:
    """The program and its address, once it is ready."""
    command = [*program, "serve", "--target", str(target), "--port", "0", *options]
    with log.open("wb") as stderr:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    try:
        wait_until(lambda: "/v1" in log.read_text(), "it is served")
        url = log.read_text().split("is served at ")[1].split("/v1")[0]
        assert httpx.get(f"{url}/ready").status_code == 200
        yield process, url
    finally:
        process.kill()
        process.wait()


def drain(process: subprocess.Popen[bytes], url: str) -> None:
    """SIGTERM while it answers: it finishes, refuses what is new, and leaves."""
    engine_id = httpx.get(f"{url}/v1/speculation").json()["engine"]["facts"]["process_id"]
    body = {"model": "m", "prompt": SECRET, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/ready").json() == {"status": "draining"}, "it drains")
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(PATIENCE_S) == 0
    wait_until(lambda: not Path(f"/proc/{engine_id}").exists(), "the engine has gone")


@pytest.mark.slow
def test_a_killed_server_goes_on_with_its_batch(
    program: list[str], roomy_target_dir: Path, tmp_path: Path
) -> None:
    """Nothing that was finished is lost or asked again; then it drains and leaves."""
    options = ("--model-name", "m", "--cache-tokens", "4096", "--max-requests", "2")
    options += ("--batch-dir", str(tmp_path / "batches"))
    with serving(program, roomy_target_dir, tmp_path / "first", *options) as (process, url):
        batch = start_batch(url)
        wait_until(lambda: look_at(url, batch)["request_counts"]["completed"] >= 3, "some are done")
        process.kill()
        process.wait()
    kept = [path.read_bytes() for path in (tmp_path / "batches" / "files").glob("*.data")]
    finished = max(kept, key=lambda text: text.count(b"batch_req_"))
    lines = [json.loads(line) for line in finished.splitlines(keepends=True) if line[-1:] == b"\n"]
    assert len(lines) >= 3
    log = tmp_path / "second"
    with serving(program, roomy_target_dir, log, *options) as (process, url):
        wait_until(lambda: look_at(url, batch)["status"] == "completed", "the rest is done")
        document = look_at(url, batch)
        assert set(document["request_counts"].values()) == {len(LINE_TOKENS), 0}
        assert document["usage"]["output_tokens"] == sum(LINE_TOKENS)
        output = httpx.get(f"{url}/v1/files/{document['output_file_id']}/content").content
        assert output.startswith(finished[: finished.rindex(b"\n") + 1])
        ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
        assert sorted(ids) == [f"line-{number}" for number in range(len(LINE_TOKENS))]
        metrics = httpx.get(f"{url}/metrics").text
        num_known = sum(LINE_TOKENS[int(line["custom_id"][-1])] for line in lines)
        num_asked = sum(LINE_TOKENS) - num_known
        assert f"fledge_answer_tokens_total {num_asked:.1f}" in metrics, "asked no line twice"
        drain(process, url)
    check_log(log.read_text())


def start_batch(url: str) -> str:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "x", "max_tokens": max_tokens},
        }
        for number, max_tokens in enumerate(LINE_TOKENS)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = httpx.post(f"{url}/v1/files", files={"file": content}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = httpx.post(f"{url}/v1/batches", json=body).json()["id"]
    return batch_id


def look_at(url: str, batch_id: str) -> Any:
    return httpx.get(f"{url}/v1/batches/{batch_id}", timeout=PATIENCE_S).json()


def check_log(text: str) -> None:
    (address,) = (line for line in text.splitlines() if not line.startswith("{"))
    assert address.endswith("/v1")
    entries = [json.loads(line) for line in text.splitlines() if line != address]
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


def test_a_target_that_cannot_be_loaded(
    run: RunProgram, warm: WarmPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_engines_warm(monkeypatch, warm)
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
