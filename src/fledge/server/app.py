"""The application: endpoints, errors in OpenAI's shape, and the gate in front of them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fledge import __version__
from fledge.server import batch_routes, file_routes, web_page
from fledge.server.api_document import describe
from fledge.server.api_errors import ApiError, InvalidRequestError, dump, error_body
from fledge.server.batch_runner import BatchRunner
from fledge.server.gate import Gate
from fledge.server.routes import router
from fledge.server.service import Service

_TYPE_NAME = re.compile(r"(str|int|float|bool)$|(list|dict|constrained|function)\W")
"""How pydantic calls the alternatives of a parameter that may be of several types."""


class _Application(FastAPI):
    """FastAPI with our own description."""

    model_names: tuple[str, ...] = ()

    def openapi(self) -> dict[str, Any]:
        return describe(self, self.model_names)


def make_app(service: Service) -> ASGIApp:
    """The application around a service, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        if service.has_batches:
            app.state.batch_runner = BatchRunner(service.batch_store, service, app)
            app.state.batch_runner.start()
        yield
        if app.state.batch_runner is not None:
            await app.state.batch_runner.stop()
        await service.stop()

    app = _Application(
        title="fledge",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.service = service
    app.model_names = service.model_names
    app.state.batch_runner = None
    app.include_router(router)
    app.include_router(web_page.router)
    app.include_router(file_routes.router)
    app.include_router(batch_routes.router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)
    gated: ASGIApp = Gate(app, service)
    if service.settings.cors_origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id"],
        )
    return gated


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.error = error
    return Response(
        dump(error.body), error.status, dict(error.headers), media_type="application/json"
    )


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if error.errors()[0]["loc"][0] != "body":
        return await _on_api_error(request, explain(error))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # A web page may send other types to any address without being allowed to.
        wrong = InvalidRequestError(
            f"the content type is {kind or 'missing'}; send Content-Type: application/json.",
            code="invalid_content_type",
        )
        return await _on_api_error(request, wrong)
    return await _on_api_error(request, explain(error))


def explain(error: RequestValidationError) -> InvalidRequestError:
    """The first thing that is wrong with a request, by the name its sender gave it."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:] if not _TYPE_NAME.match(str(part))]
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return InvalidRequestError(f"the body is not valid JSON: {detail}.", code="invalid_json")
    name = ".".join(place)
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(
            f"this server knows no parameter {name!r}.", param=name, code="unknown_parameter"
        )
    if not place:
        return InvalidRequestError("the body must be a JSON object.", code="invalid_type")
    return InvalidRequestError(f"{name}: {first['msg']}.", param=name, code=str(first["type"]))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: a wrong method, a strange path."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    message = f"{where}: {error.detail}"
    if error.status_code == 404:
        message = f"there is nothing at {where}."
    elif error.status_code == 405:
        message = f"{where} is not how this path is asked."
    headers = dict(error.headers or {})
    body = error_body(message, kind="invalid_request_error")
    return Response(dump(body), error.status_code, headers, media_type="application/json")


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours; the gate writes it into the log."""
    del error
    return await _on_api_error(request, ApiError("something went wrong in the server."))
