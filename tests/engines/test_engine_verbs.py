"""`fledge serve` and `fledge generate` with another engine: as a user runs them."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fledge.contracts.errors import MismatchError
from fledge.contracts.outside_engines import OutsideEngine
from fledge.contracts.progress import SilentProgress
from fledge.interop.engines.compare import Trial
from fledge.interop.export import export_head
from tests.engines.cases import Case
from tests.engines.conftest import installed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

KEY = "a-key-that-nobody-sees"
PROMPT = "fox hare eel"


def words(engine: str, case: Case) -> list[str]:
    python = installed(engine).python
    pair = ["--target", str(case.target), "--head", str(case.head), "--dtype", "float32"]
    return [*pair, "--engine", engine, "--engine-python", str(python)]


def fledge(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fledge", *arguments]


def our_text(case: Case) -> str:
    command = fledge("generate", "--target", str(case.target), "--prompt", PROMPT)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_generate_prints_what_our_engine_would(
    engine: str, trained: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    options = ["--prompt", PROMPT, "--depth", "4", "--width", "1", "--budget", "4", "--json"]
    command = fledge("generate", *words(engine, trained[1]), *options)
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["text"] + "\n" == our_text(trained[1])
    assert (document["engine"], document["finish_reason"]) == (engine, "stop")
    assert document["accept_length"] > 1.5
    assert len(document["accepted_at_depth"]) == 4


@contextmanager
def served(engine: str, case: Case, keys: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--model-name", "animals", "--api-keys", str(keys)]
    process = subprocess.Popen(fledge("serve", *words(engine, case), *options))
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 1500
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        assert process.poll() is None, "the server has ended"
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes() if os.name == "posix" else b""
        assert KEY.encode() not in shown
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_serve_becomes_the_engines_server(
    engine: str, trained: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\n{KEY}\n")
    body = {
        "model": "animals",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 60,
        "temperature": 0,
    }
    with served(engine, trained[0], keys) as url:
        place = f"{url}/v1/chat/completions"
        assert httpx.post(place, json=body, timeout=300).status_code == 401
        bearer = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(place, json=body, headers=bearer, timeout=300).json()
    assert answer["choices"][0]["message"]["content"] + "\n" == our_text(trained[0])


@pytest.mark.parametrize(
    ("name", "title", "form"),
    [
        ("llamacpp", "llama.cpp", ["gguf"]),
        ("llamacpp", "llama.cpp", ["gguf", "--precision", "q8_0"]),
        ("openvino", "OpenVINO GenAI", ["openvino"]),
        ("vllm", "vLLM", ["vllm"]),
        ("vllm", "vLLM", ["speculators"]),
    ],
    ids=["gguf", "gguf-q8_0", "openvino", "vllm", "speculators"],
)
def test_export_verifies_in_the_engine_itself(
    trained: list[Case], tmp_path: Path, name: OutsideEngine, title: str, form: list[str]
) -> None:
    case, python = trained[1], installed(name).python
    options = ["--target", str(case.target), "--out", str(tmp_path / "out"), "--to", *form]
    verify = ["--verify", "--engine-python", str(python), "--depth", "4", "--json"]
    command = fledge("export", str(case.head), *options, *verify)
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)["checks"][-1]
    assert re.fullmatch(
        title + r" \S+ accepts \d+%, \d+%, \d+%, \d+% of its drafts, "
        r"fledge \d+%, \d+%, \d+%, \d+%; 8 of 8 texts are the same",
        found,
    )


def test_an_engine_that_is_handed_other_layers_is_found_out(
    forced: list[Case], tmp_path: Path
) -> None:
    """The same weights said to read one layer later: files that no reader can object to."""
    case, later = forced[0], tmp_path / "later"
    shutil.copytree(case.head, later)
    config = json.loads((later / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [3, 7, 10]
    config.pop("eagle_config", None)
    (later / "config.json").write_text(json.dumps(config))
    trial = Trial(
        engine=installed("llamacpp"),
        to="gguf",
        target=str(case.target),
        head=case.head,
        depth=4,
        progress=SilentProgress(),
    )
    with pytest.raises(MismatchError, match=r"accepts 0%, .* fledge .* Nothing was kept"):
        export_head(later, tmp_path / "out", "gguf", target=str(case.target), trial=trial)
    assert not (tmp_path / "out").exists()
