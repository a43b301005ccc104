"""Object stores on loopback, with a gateway in front that fails some of the requests.

S3 is moto's server. Google's is gcp-storage-emulator behind a gateway that speaks Google's XML
interface, which is what obstore asks for: the emulator answers to the JSON interface, and of the
XML one only to whole and partial reads and to writes without conditions. The gateway therefore asks
it for heads, listings, removals and generations in JSON.
"""

import http.client
import itertools
import json
import logging
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "features"
EPOCH = "Thu, 01 Jan 1970 00:00:00 GMT"
FAULTS = ("500", "503", "reset", "lost", "torn")
"""Error answers; connections that end before the request is heeded, after it, within the answer."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


Upstream = Callable[[str, str, Mapping[str, str], bytes], Answer]


class Gateway:
    """Passes requests on, or not."""

    def __init__(self, upstream: Upstream, share: float = 0.0, seed: int = 10) -> None:
        self.upstream = upstream
        self.share = share
        """Of the requests that fail."""

        self.seen: list[tuple[str, str, str]] = []
        """Method, path and fault of each request."""

        self._chance = random.Random(seed)
        self._faults = itertools.cycle(FAULTS)
        self._lock = threading.Lock()

    def fault(self, method: str, path: str) -> str:
        with self._lock:
            fault = next(self._faults) if self._chance.random() < self.share else ""
            self.seen.append((method, path, fault))
            return fault

    @contextmanager
    def serve(self) -> Iterator[str]:
        gateway = self

        class Handler(_Handler):
            owner = gateway

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Gateway

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner.fault(self.command, self.path)
        if fault == "reset":
            self._hang_up()
            return
        if fault in ("500", "503"):
            self._send(Answer(int(fault), {}, b"<Error><Code>SlowDown</Code></Error>"))
            return
        headers = dict(self.headers.items())
        answer = self.owner.upstream(self.command, self.path, headers, body)
        if fault == "lost":
            self._hang_up()
        elif fault == "torn":
            self._send(answer, len(answer.body) // 2)
            self._hang_up()
        else:
            self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _send(self, answer: Answer, sent: int | None = None) -> None:
        self.send_response_only(answer.status)
        dropped = {"connection", "transfer-encoding", "content-length"}
        for name, value in answer.headers.items():
            if name.lower() not in dropped:
                self.send_header(name, value)
        known = next((v for k, v in answer.headers.items() if k.lower() == "content-length"), None)
        length = known if self.command == "HEAD" and known else str(len(answer.body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:sent])

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            return  # hung up

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


def pass_on(host: str, port: int) -> Upstream:
    """A server that speaks the client's language."""

    def ask(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        try:
            connection.request(method, path, body or None, dict(headers))
            found = connection.getresponse()
            return Answer(found.status, dict(found.getheaders()), found.read())
        finally:
            connection.close()

    return ask


def translate_to_google_json(host: str, port: int) -> Upstream:
    """Google's XML interface in front of a server of the JSON one."""
    ask = pass_on(host, port)
    writing = threading.Lock()

    def describe(bucket: str, key: str) -> dict[str, Any] | None:
        found = ask("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}", {}, b"")
        return dict(json.loads(found.body)) if found.status == 200 else None

    def headers_of(item: Mapping[str, Any]) -> dict[str, str]:
        return {
            "ETag": f'"{item["etag"]}"',
            "x-goog-generation": item["generation"],
            "Last-Modified": EPOCH,
            "Content-Length": str(item["size"]),
        }

    def put(bucket: str, key: str, headers: Mapping[str, str], body: bytes) -> Answer:
        wanted = headers.get("x-goog-if-generation-match")
        with writing:
            item = describe(bucket, key)
            if wanted is not None and wanted != (item["generation"] if item else "0"):
                return Answer(412)
            kept = {"Content-Type": headers.get("content-type") or "application/octet-stream"}
            ask("PUT", f"/{bucket}/{quote(key)}", kept, body)
            made = describe(bucket, key)
        assert made is not None
        return Answer(200, {**headers_of(made), "Content-Length": "0"})

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        headers = {name.lower(): value for name, value in headers.items()}
        address = urlsplit(path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if not key:
            return _list(ask, bucket, parse_qs(address.query))
        if method == "PUT":
            return put(bucket, key, headers, body)
        item = describe(bucket, key)
        if item is None:
            return Answer(404)
        if method == "DELETE":
            ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}", {}, b"")
            return Answer(204)
        if method == "HEAD":
            return Answer(200, headers_of(item))
        wanted = {"Range": headers["range"]} if "range" in headers else {}
        found = ask("GET", f"/{bucket}/{quote(key)}", wanted, b"")
        return Answer(found.status, {**headers_of(item), **_ranges(found)}, found.body)

    return answer


def _ranges(found: Answer) -> dict[str, str]:
    return {k: v for k, v in found.headers.items() if k.lower() == "content-range"}


def _list(ask: Upstream, bucket: str, query: Mapping[str, list[str]]) -> Answer:
    prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
    wanted = f"?prefix={quote(prefix, safe='')}&delimiter={quote(delimiter, safe='')}"
    found = ask("GET", f"/storage/v1/b/{bucket}/o{wanted}", {}, b"")
    if found.status != 200:
        return Answer(404)
    listed = json.loads(found.body)
    objects = "".join(
        f"<Contents><Key>{escape(item['name'])}</Key><Size>{item['size']}</Size>"
        f"<LastModified>1970-01-01T00:00:00.000Z</LastModified><ETag>{item['etag']}</ETag>"
        "</Contents>"
        for item in listed.get("items", [])
    )
    folders = "".join(
        f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
        for one in listed.get("prefixes", [])
    )
    body = f"<ListBucketResult>{objects}{folders}</ListBucketResult>"
    return Answer(200, {"Content-Type": "application/xml"}, body.encode())


class AzureBlobs:
    """As much of Azure's blob service as is asked for, in memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, tuple[bytes, str]] = {}
        self._blocks: dict[str, bytes] = {}
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        address = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        key = unquote(address.path).partition(f"/{BUCKET}/")[2]
        asked = {name.lower(): value for name, value in headers.items()}
        with self._lock:
            if query.get("comp") == "list":
                return self._list(query.get("prefix", ""), query.get("delimiter", ""))
            if query.get("comp") == "batch":
                return self._remove(body)
            if method == "PUT":
                return self._put(key, query, asked, body)
            if key not in self._blobs:
                return Answer(404)
            return self._get(key, asked.get("range") or asked.get("x-ms-range"))

    def _put(
        self, key: str, query: Mapping[str, str], asked: Mapping[str, str], body: bytes
    ) -> Answer:
        if query.get("comp") == "block":
            self._blocks[query["blockid"]] = body
            return Answer(201)
        if query.get("comp") == "blocklist":
            body = b"".join(self._blocks[name] for name in re.findall(r">([^<>]+)</Unc", str(body)))
        there = self._blobs.get(key)
        if asked.get("if-none-match") == "*" and there is not None:
            return Answer(409, {"x-ms-error-code": "BlobAlreadyExists"})
        if "if-match" in asked and (there is None or asked["if-match"] != there[1]):
            return Answer(412)
        self._count += 1
        self._blobs[key] = (body, f'"{self._count}"')
        return Answer(201, {"ETag": f'"{self._count}"', "Last-Modified": EPOCH})

    def _remove(self, body: bytes) -> Answer:
        """Azure's client removes in batches, even one."""
        address = re.findall(rf"DELETE \S*/{BUCKET}/(\S+?)[ ?]", body.decode())[0]
        status = "202 Accepted" if self._blobs.pop(unquote(address), None) else "404 Not Found"
        part = f"Content-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 {status}\r\n\r\n"
        whole = f"--one\r\n{part}\r\n--one--\r\n".encode()
        return Answer(202, {"Content-Type": "multipart/mixed; boundary=one"}, whole)

    def _get(self, key: str, wanted: str | None) -> Answer:
        data, tag = self._blobs[key]
        known = {"ETag": tag, "Last-Modified": EPOCH, "Content-Length": str(len(data))}
        if wanted is None:
            return Answer(200, known, data)
        start, end = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        end = min(end, len(data) - 1)
        span = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        return Answer(206, {**known, **span}, data[start : end + 1])

    def _list(self, prefix: str, delimiter: str) -> Answer:
        here, below = [], set()
        for name in sorted(self._blobs):
            if name.startswith(prefix):
                first, found, _ = name[len(prefix) :].partition(delimiter or "\0")
                if found:
                    below.add(prefix + first + delimiter)
                else:
                    here.append(name)
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{EPOCH}</Last-Modified>"
            f"<Content-Length>{len(self._blobs[name][0])}</Content-Length><Etag>e</Etag>"
            "<Content-Type>text</Content-Type></Properties></Blob>"
            for name in here
        )
        folders = "".join(
            f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(below)
        )
        body = (
            f"<EnumerationResults><Blobs>{blobs}{folders}</Blobs><NextMarker/></EnumerationResults>"
        )
        return Answer(200, {}, body.encode())


class Cloud(NamedTuple):
    """An object store that runs."""

    root: str
    """Address of an empty bucket."""

    environment: Mapping[str, str]
    gateway: Gateway


@contextmanager
def serve_s3() -> Iterator[Cloud]:
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    gateway = Gateway(pass_on(host, port))
    try:
        with gateway.serve() as url:
            yield Cloud(
                f"s3://{BUCKET}",
                {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url},
                gateway,
            )
    finally:
        server.stop()


@contextmanager
def serve_google() -> Iterator[Cloud]:
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    gateway = Gateway(translate_to_google_json("127.0.0.1", port))
    try:
        with gateway.serve() as url:
            account = {"gcs_base_url": url, "disable_oauth": True, "client_email": ""}
            key = json.dumps({**account, "private_key": "", "private_key_id": ""})
            environment = {"GOOGLE_BASE_URL": url, "GOOGLE_SERVICE_ACCOUNT_KEY": key}
            yield Cloud(f"gs://{BUCKET}", environment, gateway)
    finally:
        server.stop()


@contextmanager
def serve_azure() -> Iterator[Cloud]:
    gateway = Gateway(AzureBlobs())
    with gateway.serve() as url:
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_SKIP_SIGNATURE": "true",
            "AZURE_STORAGE_ENDPOINT": url,
        }
        yield Cloud(f"az://{BUCKET}", environment, gateway)


SERVERS = {"s3": serve_s3, "gs": serve_google, "az": serve_azure}
