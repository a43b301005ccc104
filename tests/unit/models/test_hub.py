"""Hub ids against a small server that speaks the hub's protocol, and without any network."""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from fledge.contracts.errors import CapacityError, FetchError
from fledge.models import hub
from fledge.models.gguf import convert_gguf
from fledge.models.resolve import resolve_target
from tests.unit.tiny_gguf import Recorder, write_tiny_gguf

COMMIT = "c" * 40
FILES: dict[str, bytes] = {}


class Hub(BaseHTTPRequestHandler):
    """Serves FILES as org/tiny; other names are missing, gated, without weights, or too large."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models").strip("/")
        repo = "/".join(path.split("/")[:2])
        if repo == "org/missing":
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repo == "org/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/tree/" in self.path:
            self._send(200, json.dumps(self._tree()).encode(), {})
        elif self.path.startswith("/api/"):
            self._send(200, json.dumps(self._listing(repo)).encode(), {})
        else:
            data = FILES[self.path.rsplit("/", 1)[1]]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": COMMIT}
            self._send(200, data if with_body else b"", headers, length=len(data))

    def _listing(self, repo: str) -> dict[str, object]:
        sizes = {name: len(data) for name, data in FILES.items()}
        if repo == "org/bare":
            sizes = {"config.json": 2, "onnx/model.safetensors": 5}
        if repo == "org/huge":
            sizes["model.safetensors"] = 10**15
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            for name, data in FILES.items()
        ]

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf")
    (folder / "out").mkdir()
    convert_gguf(folder / "tiny.gguf", folder / "out", progress=Recorder())
    FILES.update({path.name: path.read_bytes() for path in (folder / "out").iterdir()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "hub"


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_model_is_downloaded_then_found_without_network(endpoint, hub_cache, monkeypatch, capfd):
    point_to(endpoint, monkeypatch)
    recorder = Recorder()
    target = resolve_target("org/tiny", progress=recorder)
    assert target.origin == "Hugging Face hub"
    assert {path.name for path in target.directory.iterdir()} == set(FILES)
    assert recorder.labels == ["downloading org/tiny"]
    point_to("http://127.0.0.1:9", monkeypatch)
    assert resolve_target("org/tiny", progress=recorder) == target
    assert recorder.labels == ["downloading org/tiny"]
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(target.directory)
    point_to(endpoint, monkeypatch)
    assert resolve_target("org/tiny") == target


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("org/missing", FetchError, r"there is no model 'org/missing' on the Hugging Face hub"),
        ("org/gated", FetchError, r"org/gated is gated .*accept its terms.*hf auth login"),
        ("org/bare", FetchError, r"org/bare on the Hugging Face hub has no safetensors weights"),
        ("org/huge", CapacityError, r"not enough disk space for org/huge in .*: about 1000.0 TB"),
    ],
)
def test_models_that_cannot_be_had(endpoint, hub_cache, monkeypatch, name, kind, message):
    point_to(endpoint, monkeypatch)
    with pytest.raises(kind, match=message):
        resolve_target(name)


def test_no_network_fails_fast_in_a_sentence(hub_cache, monkeypatch):
    point_to("http://127.0.0.1:9", monkeypatch)
    start = time.monotonic()
    with pytest.raises(
        FetchError, match=r"'org/tiny' is not a local directory, and could not be fetched.*refused"
    ):
        hub.fetch_from_hub("org/tiny", Recorder())
    assert time.monotonic() - start < 15


def test_a_head_is_fetched_then_found_without_network(endpoint, hub_cache, monkeypatch, capfd):
    point_to(endpoint, monkeypatch)
    recorder = Recorder()
    directory = hub.fetch_head_from_hub("org/tiny", recorder)
    assert {"config.json", "model.safetensors"} <= {path.name for path in directory.iterdir()}
    point_to("http://127.0.0.1:9", monkeypatch)
    assert hub.fetch_head_from_hub("org/tiny", recorder) == directory
    assert recorder.notes == ["fetching the head org/tiny from the Hugging Face hub"]
    (directory / "model.safetensors").unlink()
    point_to(endpoint, monkeypatch)
    assert hub.fetch_head_from_hub("org/tiny", recorder) == directory
    assert (directory / "model.safetensors").is_file(), "half a head is fetched again"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["org/missing", "org/gated"])
def test_heads_that_cannot_be_had(endpoint, hub_cache, monkeypatch, name):
    point_to(endpoint, monkeypatch)
    with pytest.raises(FetchError, match=name):
        hub.fetch_head_from_hub(name, Recorder())
