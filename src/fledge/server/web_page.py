"""The page at `/`: a chat that shows which tokens were drafted, and live figures.

Its files are part of the package. They load nothing from elsewhere and hold no script or style
outside files of their own, so the browser may be told to run nothing else.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Kept, and asked for again every time: a newer server never meets an older page.
    "cache-control": "no-cache",
}
_FRONT = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


def _read_files() -> dict[str, _File]:
    """The files by the path they are asked for."""
    found = {}
    for file in resources.files("fledge.server").joinpath("page").iterdir():
        media_type = _TYPES.get(file.name.rpartition(".")[2])
        if media_type is None:
            continue
        content = file.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        path = "/" if file.name == _FRONT else f"/page/{file.name}"
        found[path] = _File(content, media_type, tag)
    return found


_FILES = _read_files()
PAGE_PATHS = frozenset(_FILES)
"""Open to everyone: they hold nothing of the target, and ask for a key where one is needed."""

router = APIRouter()


async def _send_file(request: Request) -> Response:
    file = _FILES[request.url.path]
    headers = {**_HEADERS, "etag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


for _path in sorted(PAGE_PATHS):
    router.add_api_route(_path, _send_file, methods=["GET", "HEAD"], include_in_schema=False)
