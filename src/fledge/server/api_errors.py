"""What a client is told when something is wrong: OpenAI's shape, and the status that fits."""

import json
from typing import Any

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ApiError(Exception):
    """An answer that is an error."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return error_body(str(self), kind=self.kind, param=self.param, code=self.code)

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class InvalidRequestError(ApiError):
    """The client asked for something that cannot be."""

    status, kind = 400, "invalid_request_error"


class UnauthorizedError(ApiError):
    """No key, or a wrong one."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"


class UnknownModelError(ApiError):
    """There is no such model here."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"


class NotFoundError(ApiError):
    """There is no such thing, or it is somebody else's."""

    status, kind, code = 404, "invalid_request_error", "not_found"


class ConflictError(ApiError):
    """It cannot be done while something else is being done."""

    status, kind, code = 409, "invalid_request_error", "conflict"


class SlowClientError(ApiError):
    """The request did not arrive in time."""

    status, kind, code = 408, "timeout_error", "request_timeout"


class BodyTooLargeError(ApiError):
    """The request is larger than the operator allows."""

    status, kind, code = 413, "invalid_request_error", "body_too_large"


class BusyError(ApiError):
    """The queue is full."""

    status, kind, code = 429, "rate_limit_error", "queue_full"


class FailedRequestError(ApiError):
    """The engine gave this request up."""

    status, code = 500, "request_failed"


class UnavailableError(ApiError):
    """The engine is not there at the moment."""

    status, kind, code = 503, "service_unavailable_error", "engine_unavailable"


class DeadlineError(ApiError):
    """The answer took longer than a request may."""

    status, kind, code = 504, "timeout_error", "deadline_exceeded"


class ClientGoneError(ApiError):
    """Nobody is left to read the answer; the status is for the log only."""

    status, kind, code = 499, "client_closed_request", "client_closed_request"


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def dump(document: Any) -> bytes:
    """JSON as it is sent: compact, and lone surrogates of a strange tokenizer do no harm."""
    return _encode(document).encode("utf-8", errors="replace")
