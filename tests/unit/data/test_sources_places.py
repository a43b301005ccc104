"""Where files are found: directories, patterns, and object stores on real servers of loopback.

Google's object stores are read through their XML interface, which is that of S3; so the same server
stands for both.
"""

import gzip
import re
import sys
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import boto3
import pyarrow
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import parquet

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError
from fledge.data.sources.file_names import matches
from tests.unit.data.reading import Told, as_lines, prompts, read, reader, texts, write_lines


def lay_out(root: Path) -> None:
    """Two data files, a compressed one below, and things that are none."""
    (root / "deep").mkdir(parents=True)
    (root / ".cache").mkdir()
    write_lines(root / "b.jsonl", *prompts(2, 2))
    write_lines(root / "a.json", *prompts(2))
    (root / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(as_lines(*prompts(1, 4)).encode()))
    for name in ("README.md", "dataset_infos.json", ".hidden.jsonl", "_temporary.jsonl"):
        (root / name).write_text("no data")
    write_lines(root / ".cache" / "x.jsonl", *prompts(1, 9))


SAID = [f"prompt {i}" for i in range(5)]


def test_a_directory_gives_its_data_files_in_order(tmp_path):
    lay_out(tmp_path)
    told = Told()
    source = reader(tmp_path, told=told)
    rows = list(source)
    assert texts(rows) == SAID
    assert [row.origin.file for row in rows] == [
        *["a.json"] * 2,
        *["b.jsonl"] * 2,
        "deep/c.jsonl.gz",
    ]
    assert [row.id for row in rows] == [f"src/{i}" for i in range(1, 6)]
    assert told.done == told.totals == {"reading src": sum(file.size for file in source.files)}
    assert source.report.bytes_read == told.done["reading src"]


def test_patterns_and_repeated_files(tmp_path, monkeypatch):
    lay_out(tmp_path)
    rows = read(tmp_path / "**" / "*.jsonl*")
    assert [row.origin.file for row in rows] == [*["b.jsonl"] * 2, "deep/c.jsonl.gz"]
    assert texts(read(tmp_path / "b.jsonl", tmp_path, tmp_path / "?.json")) == [
        *SAID[2:4],
        *SAID[:2],
        SAID[4],
    ]
    monkeypatch.chdir(tmp_path)
    assert [row.origin.file for row in read("d*/c*")] == ["deep/c.jsonl.gz"]
    write_lines(tmp_path / "odd[1].jsonl", *prompts(1, 7))
    assert texts(read(tmp_path / "odd[1].jsonl")) == ["prompt 7"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts(read("~/a.json")) == SAID[:2]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.json", ["a.json"]),
        ("**/*.json", ["a.json", "x/b.json", "x/y/c.json"]),
        ("x/*", ["x/b.json"]),
        ("x/**", ["x/b.json", "x/y/c.json"]),
        ("?/[a-c].json", ["x/b.json"]),
    ],
)
def test_patterns_of_addresses_are_those_of_a_shell(pattern, expected):
    names = ["a.json", "x/b.json", "x/y/c.json"]
    assert [name for name in names if matches(name, pattern)] == expected


# Object stores


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bucket of files that anybody may read."""
    root = tmp_path_factory.mktemp("objects")
    lay_out(root)
    table = pyarrow.table({"prompt": [f"row {i} {'x' * 100}" for i in range(3000)]})
    parquet.write_table(table, root / "rows.parquet", row_group_size=500, compression="none")
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket="prompts")
    for path in root.rglob("*"):
        if path.is_file():
            folder = "pq" if path.suffix == ".parquet" else "sets/one"
            key = f"{folder}/{path.relative_to(root)}"
            client.put_object(Bucket="prompts", Key=key, Body=path.read_bytes(), ACL="public-read")
    return "prompts"


@pytest.fixture(params=["s3", "gs"])
def root(request, s3_endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("GOOGLE_BASE_URL", s3_endpoint)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    return f"{request.param}://{bucket}"


def test_objects_prefixes_and_patterns(root):
    rows = read(f"{root}/sets/one/a.json")
    assert texts(rows) == SAID[:2]
    assert rows[0].origin.file == f"{root}/sets/one/a.json"
    assert texts(read(f"{root}/sets")) == SAID
    assert texts(read(f"{root}/sets/one/")) == SAID
    assert texts(read(f"{root}/sets/*/b.jsonl", f"{root}/sets/one/deep")) == SAID[2:]
    source = reader(f"{root}/sets/one/b.jsonl")
    assert len(list(source)) == 2
    assert source.report.bytes_read == source.files[0].size


def test_parquet_objects(root):
    rows = read(f"{root}/pq/rows.parquet")
    assert len(rows) == 3000
    assert rows[2999].messages[0]["content"].startswith("row 2999 ")


def test_objects_that_are_not_there(root):
    with pytest.raises(ArtifactError, match=r"nothing to read at .*/sets/two: no object"):
        read(f"{root}/sets/two")
    with pytest.raises(ArtifactError, match=r"nothing to read at .*/sets/\*\.csv"):
        read(f"{root}/sets/*.csv")
    with pytest.raises(ConfigError, match=r"names no bucket; write (s3|gs)://bucket/name"):
        read(f"{root.partition('://')[0]}:///x")


def test_an_object_that_vanishes(root, s3_endpoint, bucket):
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    body = as_lines(*prompts(1)).encode()
    client.put_object(Bucket=bucket, Key="gone.jsonl", Body=body, ACL="public-read")
    source = reader(f"{root}/gone.jsonl")
    client.delete_object(Bucket=bucket, Key="gone.jsonl")
    with pytest.raises(ArtifactError, match=r"gone.jsonl is not there \(any more\)"):
        list(source)


def test_stores_that_cannot_be_used(monkeypatch, root):
    with pytest.raises(FetchError, match=r"^(s3|gs)://nobody/x/ cannot be read: .*Check"):
        read(f"{root.partition('://')[0]}://nobody/x/")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"needs obstore: .*'fledge\[cloud\]'"):
        read(f"{root}/x")


EPOCH = formatdate(0, usegmt=True)


class Blobs(BaseHTTPRequestHandler):
    """As much of Azure's blob service as reading takes."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes] = {}

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        name = unquote(address.path).partition("/container/")[2]
        if query.get("comp") == ["list"]:
            self._send(200, self._listing(query.get("prefix", [""])[0]), with_body=True)
        elif name not in self.objects:
            self._send(404, b"", with_body=with_body)
        else:
            data = self.objects[name]
            wanted = re.search(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted is None:
                self._send(200, data, with_body=with_body)
            else:
                start, end = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
                span = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
                self._send(206, data[start : end + 1], with_body=with_body, **span)

    def _listing(self, prefix: str) -> bytes:
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{EPOCH}</Last-Modified>"
            f"<Content-Length>{len(data)}</Content-Length><Content-Type>text</Content-Type>"
            "<Etag>e</Etag></Properties></Blob>"
            for name, data in sorted(self.objects.items())
            if name.startswith(prefix)
        )
        return (
            "<EnumerationResults><Blobs>" + blobs + "</Blobs><NextMarker/></EnumerationResults>"
        ).encode()

    def _send(self, status: int, data: bytes, *, with_body: bool, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("ETag", "e")
        self.send_header("Last-Modified", EPOCH)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


def test_azure(monkeypatch):
    Blobs.objects = {
        "sets/a.jsonl": as_lines(*prompts(2)).encode(),
        "sets/b.jsonl": as_lines(*prompts(3, 2)).encode(),
        "sets/notes.md": b"x",
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Blobs)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        assert texts(read("az://container/sets")) == SAID
        assert texts(read("az://container/sets/b.jsonl")) == SAID[2:]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_azure_without_an_account():
    with pytest.raises(FetchError, match=r"az://container/x cannot be read: .*[Aa]ccount"):
        read("az://container/x")
