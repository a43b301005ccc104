"""Data sets of the hub, from a small server that speaks the hub's protocol, and without one."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, FetchError
from tests.unit.data.reading import Told, as_lines, prompts, read, reader, texts

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves `sets`; other names are missing, gated or too large."""

    sets: dict[str, dict[str, bytes]] = {}
    fetched: list[str] = []

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        is_listing = path.startswith("/api/")
        parts = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        repo = "/".join(parts[:2])
        if repo == "org/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repo not in self.sets:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif is_listing:
            self._send(200, json.dumps(self._listing(repo)).encode(), {})
        elif (name := "/".join(parts[4:])) not in self.sets[repo]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            data = self.sets[repo][name]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": COMMIT}
            if with_body:
                self.fetched.append(name)
            self._send(200, data if with_body else b"", headers, length=len(data))

    def _listing(self, repo: str) -> dict[str, object]:
        siblings = [
            {"rfilename": name, "size": 10**15 if repo == "org/huge" else len(data)}
            for name, data in self.sets[repo].items()
        ]
        return {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []}

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


def table(path: Path, first: int) -> bytes:
    rows = [row["prompt"] for row in prompts(2, first)]
    parquet.write_table(pyarrow.table({"prompt": rows}), path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sets")
    lines = as_lines(*prompts(2)).encode()
    Hub.sets = {
        "org/tables": {
            "README.md": b"card",
            "data/train-00000-of-00002.parquet": table(folder / "a", 0),
            "data/train-00001-of-00002.parquet": table(folder / "b", 2),
            "data/test-00000-of-00001.parquet": table(folder / "c", 4),
            "extra.jsonl": lines,
        },
        "org/lines": {
            "en/chat.jsonl": lines,
            "en/chat_test.jsonl": lines,
            "LICENSE.txt": b"words",
            "dataset_infos.json": b"{}",
        },
        "org/tests": {"test.jsonl": lines},
        "org/bare": {"README.md": b"card", "script.py": b"pass"},
        "org/huge": {"all.jsonl": lines},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    Hub.fetched.clear()
    return tmp_path / "hub"


def test_training_files_of_a_data_set_are_read_one_by_one(hub, capfd):
    told = Told()
    source = reader("hf://org/tables", told=told)
    assert Hub.fetched == []
    first = next(iter(source))
    assert first.origin.file == f"hf://org/tables@{COMMIT[:12]}/data/train-00000-of-00002.parquet"
    assert Hub.fetched == ["data/train-00000-of-00002.parquet"]
    assert texts([first, *source]) == [f"prompt {i}" for i in range(4)]
    assert told.notes[0] == (
        "hf://org/tables: 2 of 3 data files are read, from data/train-00000-of-00002.parquet; name "
        "others as hf://org/tables/FILE"
    )
    assert "downloading hf://org/tables/data/train-00001-of-00002.parquet" in told.totals
    assert len(read("hf://org/tables")) == 4
    assert len(Hub.fetched) == 2
    assert capfd.readouterr() == ("", "")


def test_other_ways_to_name_a_data_set(hub):
    assert texts(read("hf://datasets/org/lines")) == ["prompt 0", "prompt 1"]
    assert Hub.fetched == ["en/chat.jsonl"]
    assert len(read("hf://org/tests")) == 2
    assert texts(read("hf://org/tables@main/data/test*")) == ["prompt 4", "prompt 5"]
    assert len(read("hf://org/lines/en/")) == 4


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("hf://org/missing", FetchError, r"there is no data set hf://org/missing on the Hugging F"),
        ("hf://org/gated", FetchError, r"hf://org/gated is gated .*accept its terms.*auth login"),
        ("hf://org/bare", ArtifactError, r"org/bare .* has no parquet or JSON files; it has READM"),
        ("hf://org/lines/x.csv", ArtifactError, r"org/lines .* has no file 'x.csv'; it has LICENS"),
        ("hf://org/huge", CapacityError, r"not enough disk space for hf://org/huge/all.jsonl in "),
        ("hf://", ConfigError, r"'hf://' is no data set; write hf://owner/name"),
        ("hf://a b/c", ConfigError, r"'hf://a b/c' is no data set"),
    ],
)
def test_data_sets_that_cannot_be_had(hub, address, kind, message):
    with pytest.raises(kind, match=message):
        read(address)


def test_no_network_fails_fast_in_a_sentence(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(
        FetchError,
        match=r"hf://org/tables could not be fetched from the Hugging Face hub: .*refused\. Check "
        r"the network, or fetch the data set elsewhere and give its directory",
    ):
        read("hf://org/tables")
    assert time.monotonic() - start < 15


def test_a_file_goes_away_between_listing_and_fetching(hub, monkeypatch):
    source = reader("hf://org/tests")
    monkeypatch.setitem(Hub.sets, "org/tests", {})
    with pytest.raises(FetchError, match=r"hf://org/tests/test.jsonl could not be fetched .*404"):
        list(source)
