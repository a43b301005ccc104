"""What our answers look like, for the OpenAPI document; and where their ids lead."""

from typing import Any, get_args

from fledge.server.batch_records import Status

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _exactly(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _list_of(entry: Schema, **more: Schema) -> Schema:
    return _object(object=_exactly("list"), data={"type": "array", "items": entry}, **more)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_REASON = _exactly("stop", "length", "tool_calls")
_MESSAGE = _object(role=_exactly("assistant"), content=_maybe(_TEXT))
_PAGE = {"first_id": _maybe(_TEXT), "last_id": _maybe(_TEXT), "has_more": {"type": "boolean"}}


def _answer(kind: str, **choice: Schema) -> Schema:
    entry = _object(index=_COUNT, finish_reason=_REASON, logprobs=_maybe(_OBJECT), **choice)
    return _object(
        id=_TEXT,
        object=_exactly(kind),
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "items": entry},
        usage=_USAGE,
        fledge=_OBJECT,
    )


SCHEMAS: dict[str, Schema] = {
    "ChatCompletion": _answer("chat.completion", message=_MESSAGE),
    "Completion": _answer("text_completion", text=_TEXT),
    "Model": _object(id=_TEXT, object=_exactly("model"), created=_COUNT, owned_by=_TEXT),
    "ModelList": _list_of(_ref("Model")),
    "Tokens": _object(
        tokens={"type": "array", "items": _COUNT}, count=_COUNT, max_model_len=_COUNT
    ),
    "File": _object(
        id=_TEXT,
        object=_exactly("file"),
        bytes=_COUNT,
        created_at=_COUNT,
        expires_at=_COUNT,
        filename=_TEXT,
        purpose=_exactly("batch", "batch_output"),
        status=_exactly("processed"),
    ),
    "FileList": _list_of(_ref("File"), **_PAGE),
    "FileDeleted": _object(id=_TEXT, object=_exactly("file"), deleted={"type": "boolean"}),
    "Batch": _object(
        id=_TEXT,
        object=_exactly("batch"),
        endpoint=_TEXT,
        errors=_maybe(_list_of(_OBJECT)),
        input_file_id=_TEXT,
        completion_window=_TEXT,
        status=_exactly(*get_args(Status)),
        output_file_id=_maybe(_TEXT),
        error_file_id=_maybe(_TEXT),
        created_at=_COUNT,
        expires_at=_COUNT,
        request_counts=_object(total=_COUNT, completed=_COUNT, failed=_COUNT),
        usage=_OBJECT,
        metadata=_maybe({"type": "object", "additionalProperties": _TEXT}),
    ),
    "BatchList": _list_of(_ref("Batch"), **_PAGE),
}

ANSWERS = {
    ("post", "/v1/chat/completions"): "ChatCompletion",
    ("post", "/v1/completions"): "Completion",
    ("get", "/v1/models"): "ModelList",
    ("get", "/v1/models/{name}"): "Model",
    ("post", "/tokenize"): "Tokens",
    ("post", "/v1/files"): "File",
    ("get", "/v1/files"): "FileList",
    ("get", "/v1/files/{file_id}"): "File",
    ("delete", "/v1/files/{file_id}"): "FileDeleted",
    ("post", "/v1/batches"): "Batch",
    ("get", "/v1/batches"): "BatchList",
    ("get", "/v1/batches/{batch_id}"): "Batch",
    ("post", "/v1/batches/{batch_id}/cancel"): "Batch",
}
"""What an endpoint answers when all is well."""

_FILE_USES = (
    ("get", "/v1/files/{file_id}"),
    ("get", "/v1/files/{file_id}/content"),
    ("delete", "/v1/files/{file_id}"),
)
_BATCH_USES = (("get", "/v1/batches/{batch_id}"), ("post", "/v1/batches/{batch_id}/cancel"))


def links_of(method: str, path: str, operation_ids: dict[tuple[str, str], str]) -> Schema:
    """Where the id in an answer may be used."""
    if method != "post" or path not in ("/v1/files", "/v1/batches"):
        return {}
    is_file = path == "/v1/files"
    name = "file_id" if is_file else "batch_id"
    links: Schema = {
        operation_ids[use]: {
            "operationId": operation_ids[use],
            "parameters": {name: "$response.body#/id"},
        }
        for use in (_FILE_USES if is_file else _BATCH_USES)
    }
    if is_file:
        body = {
            "input_file_id": "$response.body#/id",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        create = operation_ids["post", "/v1/batches"]
        links[create] = {"operationId": create, "requestBody": body}
    return links
