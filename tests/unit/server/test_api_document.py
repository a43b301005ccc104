"""The OpenAPI document: whatever it names exists, and what it admits is what is answered."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from fledge.contracts.batch_settings import BatchSettings
from fledge.server.response_schemas import ANSWERS
from fledge.server.service import Service
from tests.unit.server.test_service import ask


def test_names_in_the_document_exist() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del service
        document = (await client.get("/openapi.json")).json()
        operations = {
            (method, path): operation
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        }
        assert ANSWERS.keys() <= operations.keys()
        text = json.dumps(document)
        named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
        assert named <= document["components"]["schemas"].keys()
        ids = {operation["operationId"] for operation in operations.values()}
        links = [
            link["operationId"]
            for operation in operations.values()
            for link in operation["responses"]["200"].get("links", {}).values()
        ]
        assert len(links) == 6
        assert set(links) <= ids
        content = operations["get", "/v1/files/{file_id}/content"]["responses"]["200"]["content"]
        assert list(content) == ["application/octet-stream"]

    ask(work)


def test_probes_may_ask_for_headers_only() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del service
        for path, status in (("/health", 200), ("/ready", 503), ("/metrics", 200)):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (status, b"")

    ask(work)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_queries_that_are_wrong(tmp_path: Path, query: str, param: str) -> None:
    """They are told what is wrong, and not that their content type is missing."""

    async def work(client: httpx.AsyncClient, service: Service) -> None:
        service.open_batches()
        try:
            answer = await client.get(f"/v1/files?{query}")
        finally:
            service.batch_store.close()
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    ask(work, batches=BatchSettings(directory=str(tmp_path)))


def test_a_server_without_batches_says_so() -> None:
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        del service
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
            answer: Any = await client.get(path)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "batches_unavailable"

    ask(work)
