"""The flaky server with the Batch API: files, batches, partial results, expiry, lost answers."""

import asyncio
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.unit.data.flaky_server import FlakyServer, Request, Response, error


class BatchServer(FlakyServer):
    """Batches are over at the third look; `mishaps` says what goes wrong with the n-th."""

    def __init__(self, *, mishaps: dict[int, str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._mishaps = mishaps or {}
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.looks: Counter[str] = Counter()
        self.is_held = False
        """While set, no batch gets over."""

        self.handed_in: Counter[str] = Counter()
        """Requests that were in any batch, by custom id."""

    async def route(self, request: Request) -> Response:
        path = urlsplit(request.path).path
        if request.method == "POST" and path == "/v1/files":
            return self._take_file(request)
        if request.method == "POST" and path == "/v1/batches":
            return self._start(json.loads(request.body))
        if path == "/v1/batches":
            return self._list(parse_qs(urlsplit(request.path).query))
        if match := re.fullmatch(r"/v1/batches/([\w-]+)", path):
            return self._look(match[1])
        if match := re.fullmatch(r"/v1/files/([\w-]+)/content", path):
            await asyncio.sleep(0)
            return Response(200, None, {}, self.files[match[1]])
        return await super().route(request)

    def _take_file(self, request: Request) -> Response:
        boundary = request.headers["content-type"].split("boundary=")[1].encode()
        parts = request.body.split(b"--" + boundary)
        named = {
            re.findall(rb'name="(\w+)"', head)[0]: body.removesuffix(b"\r\n")
            for head, _, body in (part.partition(b"\r\n\r\n") for part in parts[1:-1])
        }
        assert named[b"purpose"] == b"batch"
        return Response(200, {"id": self._store(named[b"file"])})

    def _store(self, content: bytes) -> str:
        file_id = f"file-{len(self.files) + 1}"
        self.files[file_id] = content
        return file_id

    def _start(self, body: dict[str, Any]) -> Response:
        number = len(self.batches) + 1
        batch_id = f"batch_{number}"
        mishap = self._mishaps.get(number, "")
        self.batches[batch_id] = {
            "id": batch_id,
            "input_file_id": body["input_file_id"],
            "endpoint": body["endpoint"],
            "status": "validating",
        }
        for line in self.files[body["input_file_id"]].splitlines():
            self.handed_in[json.loads(line)["custom_id"]] += 1
        if mishap == "lost answer":
            return Response(200, self.batches[batch_id], {"send": "closed"})
        return Response(200, self.batches[batch_id])

    def _list(self, query: dict[str, list[str]]) -> Response:
        newest_first = list(self.batches.values())[::-1]
        if after := query.get("after"):
            ids = [batch["id"] for batch in newest_first]
            newest_first = newest_first[ids.index(after[0]) + 1 :]
        return Response(200, {"data": newest_first[: int(query["limit"][0])]})

    def _look(self, batch_id: str) -> Response:
        if batch_id not in self.batches:
            return error(404, "no such batch")
        batch = self.batches[batch_id]
        self.looks[batch_id] += 1
        if self.looks[batch_id] == 2:
            return error(503, "busy")
        if self.looks[batch_id] >= 3 and not self.is_held and batch["status"] == "validating":
            self._complete_batch(batch, self._mishaps.get(int(batch_id.split("_")[1]), ""))
        return Response(200, batch)

    def _complete_batch(self, batch: dict[str, Any], mishap: str) -> None:
        if mishap == "failed":
            batch["status"] = "failed"
            batch["errors"] = {"data": [{"message": "enqueued token limit reached"}]}
            return
        answers, errors = [], []
        for number, line in enumerate(self.files[batch["input_file_id"]].splitlines()):
            asked = json.loads(line)
            assert asked["url"] == batch["endpoint"]
            if mishap == "expired" and number % 3 == 0:
                errors.append({"custom_id": asked["custom_id"], "error": {"code": "batch_expired"}})
                continue
            response = self.answer(asked["body"])
            status = 503 if mishap == "busy" and number % 4 == 1 else response.status
            document = {"error": "busy"} if status == 503 else response.document
            if mishap == "nonsense" and number % 5 == 0:
                document = {"choices": []}
            result = {
                "custom_id": asked["custom_id"],
                "response": {"status_code": status, "body": document},
                "error": None,
            }
            (answers if status == 200 else errors).append(result)
        batch["status"] = "expired" if mishap == "expired" else "completed"
        for name, lines in (("output_file_id", answers[::-1]), ("error_file_id", errors)):
            if lines:
                text = "".join(json.dumps(line) + "\n" for line in lines)
                batch[name] = self._store(text.encode() + b"not json\n")
