"""The OpenAPI document: what the framework knows of our endpoints, and what it does not."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fledge.server.response_schemas import ANSWERS, SCHEMAS, links_of

_ERRORS = {
    "400": "The request cannot be served as it is.",
    "401": "No API key, or a wrong one.",
    "404": "There is no such model or path.",
    "405": "The path is asked in another way.",
    "408": "The request did not arrive in time.",
    "409": "It is in use, or it is over.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to come back.",
    "500": "The request failed.",
    "503": "The engine is not ready.",
    "504": "The answer took too long.",
}
_STREAMING = ("/v1/chat/completions", "/v1/completions")
_REQUESTS = ("ChatRequest", "CompletionRequest", "TokenizeRequest")


def describe(app: FastAPI, model_names: tuple[str, ...]) -> dict[str, Any]:
    """The document with our errors, our streams and the names of the target."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": _error_schema(), **SCHEMAS}
    for name in _REQUESTS:
        model = schemas[name]["properties"]["model"]
        kinds = model.get("anyOf", [model])
        kinds[0]["enum"] = list(model_names)
    operation_ids = {
        (method, path): operation["operationId"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe_operation(path, operation)
            answer = operation["responses"]["200"]
            if (method, path) in ANSWERS:
                reference = {"$ref": f"#/components/schemas/{ANSWERS[method, path]}"}
                answer["content"]["application/json"]["schema"] = reference
            if links := links_of(method, path, operation_ids):
                answer["links"] = links
    return document


def _describe_operation(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    for status, sentence in _ERRORS.items():
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses[status] = {"description": sentence, "content": content}
    if path == "/ready":
        responses["503"]["content"] = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMING:
        responses["200"]["content"]["text/event-stream"] = {}
    if path == "/v1/files/{file_id}/content":
        responses["200"]["content"] = {"application/octet-stream": {}}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}


def _error_schema() -> dict[str, Any]:
    maybe = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": maybe,
        "code": maybe,
    }
    error = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
