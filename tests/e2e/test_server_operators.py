"""What operators rely on: keys, limits, errors, clients that misbehave, engines that die."""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fledge import Engine, EngineSettings, SamplingParams
from tests.e2e.server_support import (
    CLIENT_TIMEOUT_S,
    KEY,
    KEYS_FILE,
    MODEL,
    OTHER_KEY,
    RunningServer,
    altered,
    wait_until,
)

ENDLESS = {"max_tokens": 6000, "temperature": 0}
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def server(limited_server: RunningServer) -> RunningServer:
    limited_server.wait_until_ready()
    return limited_server


@pytest.fixture
def keys_file(server: RunningServer) -> Iterator[Path]:
    """The file of keys, which is as it was afterwards."""
    file = Path(str(server.service.settings.api_keys_file))
    yield file
    file.write_text(KEYS_FILE, encoding="utf-8")
    headers = {"authorization": f"Bearer {OTHER_KEY}"}
    wait_until(
        lambda: httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200,
        "the keys count again",
    )


def test_answers_without_a_head_equal_the_engine(
    server: RunningServer, roomy_target_dir: Path
) -> None:
    engine = Engine.load(
        str(roomy_target_dir), settings=EngineSettings(cache_tokens=4096), device="cpu"
    )
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 5}
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, **sampling, extra_body={"return_token_ids": True}
    )
    (expected,) = engine.generate([HELLO], SamplingParams(**sampling))
    assert answer.choices[0].token_ids == list(expected.token_ids)
    assert answer.fledge["accept_length"] == 1.0


def test_keys(server: RunningServer, keys_file: Path) -> None:
    def status(key: str | None) -> int:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        return httpx.get(f"{server.url}/v1/models", headers=headers).status_code

    assert [status(key) for key in (KEY, OTHER_KEY, "wrong", None)] == [200, 200, 401, 401]
    assert httpx.get(f"{server.url}/ready").status_code == 200
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="is not one of this server's") as caught,
    ):
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"
    keys_file.write_text(f"{KEY}\nthird-key\n", encoding="utf-8")
    wait_until(lambda: status("third-key") == 200, "the new key counts")
    assert status(OTHER_KEY) == 401
    keys_file.rename(keys_file.with_suffix(".away"))
    time.sleep(1.1)
    assert status(KEY) == 200, "a file that is not there changes nothing"


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"model": "other"}, 404, "model_not_found", "there is no model 'other' here"),
        ({"messages": []}, 400, "too_short", "messages: "),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "literal_error", "messages.0.role"),
        ({"temperature": "hot"}, 400, "float_type", "temperature: "),
        ({"temperature": -1}, 400, "greater_than_equal", "temperature: "),
        ({"top_p": 0}, 400, "greater_than", "top_p: "),
        ({"mirostat": 2}, 400, "unknown_parameter", "no parameter 'mirostat'"),
        (
            {"response_format": {"type": "xml"}},
            400,
            "unsupported_parameter",
            "response_format of type 'xml' is not supported",
        ),
        ({"tools": [], "tool_choice": "required"}, 400, None, "there are no tools"),
        ({"modalities": ["audio"]}, 400, "unsupported_parameter", "modalities"),
        ({"top_logprobs": 2}, 400, None, "top_logprobs is given and logprobs is not"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "less_than_equal", "top_logprobs: "),
        ({"stop": [""]}, 400, None, "a stop text is empty"),
        ({"stop": ["x"] * 17}, 400, None, "stop has 17 texts; at most 16"),
        ({"logit_bias": {"a": 1}}, 400, None, "logit_bias names 'a'"),
        ({"logit_bias": {"1": 101}}, 400, None, "logit_bias of token 1 is 101"),
        ({"logit_bias": {"99999": 1}}, 400, None, "logit_bias names token id 99999"),
        ({"n": 4}, 400, None, "asks for 4 answers and this server gives at most 3"),
        ({"max_tokens": 6001}, 400, None, "max_tokens is 6001 and this server allows at most 6000"),
        (
            {"messages": [{"role": "user", "content": "x" * 300}]},
            400,
            "context_length_exceeded",
            "takes at most 300",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "unsupported_parameter",
            "content of type 'image_url'",
        ),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400, None, "may not set chat_template"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, 413, "body_too_large", "20000"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_errors(
    server: RunningServer,
    fields: dict[str, Any],
    status: int,
    code: str | None,
    words: str,
    is_stream: bool,
) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": is_stream, **fields}
    response = server.post(PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (b'{"model": ', "application/json", "not valid JSON"),
        (b"[1]", "application/json", "must be a JSON object"),
        (b"[" * 9_000, "application/json", ""),
        (b"\xff\xfe", "application/json", ""),
        (b'{"model": "tiny"}', "text/plain", "send Content-Type: application/json"),
        (b'{"model": "tiny", "messages": [], "seed": NaN}', "application/json", ""),
    ],
)
def test_bodies_that_are_no_requests(
    server: RunningServer, body: bytes, content_type: str, words: str
) -> None:
    response = server.http.post(PATH, content=body, headers={"content-type": content_type})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "there is no prompt"),
        ({"prompt": [[]]}, "the prompt has no tokens"),
        ({"prompt": [99999]}, "the prompt holds token id 99999"),
        ({"prompt": {"a": 1}}, "prompt: "),
        ({"echo": True, "logprobs": 1}, "does not support echo together with logprobs"),
        ({"suffix": "x"}, "does not support suffix"),
        ({"best_of": 3}, "does not support best_of"),
        ({"min_tokens": 1, "stop_token_ids": [99999]}, "stop_token_ids holds token id 99999"),
    ],
)
def test_errors_of_completions(server: RunningServer, fields: dict[str, Any], words: str) -> None:
    response = server.complete(**fields)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_paths_and_methods(server: RunningServer) -> None:
    assert server.http.get("/v2/models").json()["error"]["message"].startswith("there is nothing")
    assert server.http.get(PATH).status_code == 405
    assert server.post("/tokenize", {}).json()["error"]["message"].startswith("give either")
    origin = server.http.get("/v1/models", headers={"origin": "http://example.org"})
    assert "access-control-allow-origin" not in origin.headers


def test_a_client_that_leaves_frees_the_engine(server: RunningServer) -> None:
    with server.stream(**ENDLESS) as events:
        assert next(events)["choices"][0]["text"]
        wait_until(lambda: server.stats()["num_running"] == 1, "the figures show the request")
    server.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", **ENDLESS}, timeout=0.5
        )
    server.wait_until_idle()
    assert server.service.supervisor.num_waiting == 0
    assert server.stats()["cache_usage"] == 0
    assert 'status="499"' in server.http.get("/metrics").text


def test_a_full_server_sends_clients_away(server: RunningServer) -> None:
    """Two answers are made, two wait; whoever waits and leaves makes room."""
    with ExitStack() as stack:
        streams = [stack.enter_context(server.stream(**ENDLESS)) for _ in range(2)]
        assert all(next(events)["choices"] for events in streams)
        waiting = [stack.enter_context(impatient(server)) for _ in range(2)]
        wait_until(lambda: server.stats()["num_waiting"] == 2, "two requests wait")
        refused = server.complete(max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError, match="the server is full"):
            server.openai.completions.create(model=MODEL, prompt="x", max_tokens=1)
        for client in waiting:
            client.close()
        wait_until(lambda: server.stats()["num_waiting"] == 0, "nobody waits")
    server.wait_until_idle()
    assert server.complete(max_tokens=1).status_code == 200


def impatient(server: RunningServer) -> socket.socket:
    """A connection with a request whose answer nobody reads."""
    body = json.dumps({"model": MODEL, "prompt": "x", **ENDLESS}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client = connect(server)
    client.sendall(head.encode() + body)
    return client


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_takes_too_long(server: RunningServer, is_stream: bool) -> None:
    with altered(server, request_timeout_s=1.5):
        response = server.complete(**ENDLESS, stream=is_stream)
    if is_stream:
        assert response.status_code == 200
        last = response.text.strip().splitlines()[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "not finished within 1.5 s" in error["message"]
    server.wait_until_idle()


def test_prompts_are_logged_only_when_told(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fledge.server.request")

    def fields_of(prompt: str) -> dict[str, Any]:
        caplog.clear()
        text = server.complete(prompt=prompt, max_tokens=3).json()["choices"][0]["text"]
        wait_until(lambda: caplog.records, "the request is logged")
        fields: dict[str, Any] = caplog.records[-1].fields
        assert fields.get("answers", [text]) == [text]
        return fields

    quiet = fields_of("a secret")
    assert "secret" not in str(quiet)
    assert "answers" not in quiet
    with altered(server, log_prompts=True):
        assert fields_of("no secret")["prompt"] == {"prompt": "no secret"}


def test_errors_in_a_stream_reach_the_client(server: RunningServer) -> None:
    with altered(server, request_timeout_s=1.5):
        stream = server.openai.completions.create(model=MODEL, prompt="x", stream=True, **ENDLESS)
        with pytest.raises(openai.APIError, match="not finished within"):
            list(stream)


def read_to_end(client: socket.socket) -> bytes:
    received = b""
    try:
        while data := client.recv(4096):
            received += data
    except ConnectionResetError:
        pass
    return received


def test_clients_that_say_nothing_or_nonsense(server: RunningServer) -> None:
    """They are let go, and nobody else notices."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    openings = {
        "silent": b"",
        "half a header": b"POST / HTTP/1.1\r\nx: ",
        "garbage": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        "endless header": b"GET / HTTP/1.1\r\nx: " + b"y" * 66_000,
        "half a body": head.encode() + b"content-length: 100\r\n\r\n{",
    }
    clients = {name: connect(server) for name in openings}
    started = time.monotonic()
    for name, opening in openings.items():
        clients[name].sendall(opening)
    trickle = clients["half a header"]
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.2):
            try:
                trickle.sendall(b"z")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert server.complete(max_tokens=4).status_code == 200
    assert time.monotonic() - started < CLIENT_TIMEOUT_S * 10
    answers = {name: read_to_end(client) for name, client in clients.items()}
    stop.set()
    dripping.join()
    for client in clients.values():
        client.close()
    assert answers["silent"] == answers["half a header"] == b""
    assert answers["garbage"].startswith(b"HTTP/1.1 400")
    assert b"The headers are too long." in answers["endless header"]
    assert answers["half a body"].startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answers["half a body"]


def test_an_engine_that_hangs_is_ended_and_started_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, and a process that is killed is all that there is to see of a crash."""
    facts = server.service.supervisor.facts
    assert facts is not None
    restarts = server.service.supervisor.num_restarts
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 300}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": asked}
    file = server.openai.files.create(file=json.dumps(line).encode(), purpose="batch")
    batch = server.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    with server.stream(**ENDLESS) as events:
        assert "text" in next(events)["choices"][0]
        wait_until(
            lambda: server.openai.batches.retrieve(batch.id).status != "validating",
            "the batch runs too",
        )
        os.kill(facts.process_id, signal.SIGSTOP)
        monkeypatch.setattr(server.service.supervisor, "_stall_s", 1.5)
        *_, last = list(events)
        assert last["error"]["code"] == "engine_unavailable"
        assert "the engine stopped while it was answering" in last["error"]["message"]
    response = server.http.get("/ready")
    assert (response.status_code, response.json()) == (503, {"status": "restarting"})
    assert server.http.get("/health").status_code == 200
    refused = server.complete(max_tokens=1)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    with pytest.raises(openai.InternalServerError, match="the engine is not ready"):
        server.openai.completions.create(model=MODEL, prompt="x")
    assert "fledge_engine_up 0.0" in server.http.get("/metrics").text
    monkeypatch.undo()
    server.wait_until_ready()
    assert server.service.supervisor.num_restarts == restarts + 1
    assert server.complete(max_tokens=3, temperature=0).json()["usage"]["completion_tokens"] == 3
    wait_until(
        lambda: server.openai.batches.retrieve(batch.id).status == "completed",
        "the line of the batch is answered by the new engine",
    )
    assert server.openai.batches.retrieve(batch.id).usage.output_tokens == 300
