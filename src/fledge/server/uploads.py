"""Takes a file that is sent as a form, piece by piece: it is never in memory as a whole."""

import asyncio
import logging
import re
from pathlib import Path

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fledge.server.api_errors import BodyTooLargeError, InvalidRequestError

# It warns of every form that is wrong; whoever sent it is told, and the log is for the operator.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_WRITE_BYTES = 1 << 20
_MAX_NAME_LENGTH = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class UploadForm:
    """A form with one file in it."""

    def __init__(self, content_type: str, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
            raise InvalidRequestError(
                "a file is sent as a form: Content-Type: multipart/form-data with a boundary.",
                code="invalid_content_type",
            )
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.num_bytes = 0
        self._max_file_bytes = max_file_bytes
        self._fresh: list[bytes] = []
        self._has_file = self._is_whole = False
        self._header_name, self._header_value = b"", b""
        self._disposition: dict[bytes, bytes] = {}
        self._field = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError(f"the form cannot be read: {error}.") from error

    def take(self) -> bytes:
        """Content of the file that came since the last call."""
        fresh, self._fresh = b"".join(self._fresh), []
        return fresh

    @property
    def num_fresh(self) -> int:
        return sum(map(len, self._fresh))

    def finish(self) -> None:
        if not self._is_whole:
            raise InvalidRequestError("the form has no end.")
        if not self._has_file:
            raise InvalidRequestError("the form has no part called file.", param="file")

    def _on_part_begin(self) -> None:
        self._disposition, self._field = {}, b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, self._disposition = parse_options_header(self._header_value)
        self._header_name, self._header_value = b"", b""

    def _on_headers_finished(self) -> None:
        if self._name == "file":
            if self._has_file:
                raise InvalidRequestError("the form has two parts called file.", param="file")
            self._has_file = True
            self.filename = plain_name(self._disposition.get(b"filename", b""))
        elif len(self.fields) >= _MAX_FIELDS:
            raise InvalidRequestError(f"the form has more than {_MAX_FIELDS} fields.")

    @property
    def _name(self) -> str:
        return self._disposition.get(b"name", b"").decode("utf-8", errors="replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file":
            self._field += data[start:end]
            if len(self._field) > _MAX_FIELD_BYTES:
                raise InvalidRequestError("a field of the form is too long.", param=self._name)
            return
        self.num_bytes += end - start
        if self.num_bytes > self._max_file_bytes:
            raise BodyTooLargeError(
                f"the file is larger than {self._max_file_bytes} bytes, the limit of this server."
            )
        self._fresh.append(data[start:end])

    def _on_part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", errors="replace")

    def _on_end(self) -> None:
        self._is_whole = True


async def receive_form(request: Request, form: UploadForm, path: Path) -> None:
    """Write the file of a form to `path`, or nothing."""
    file = await asyncio.to_thread(path.open, "xb")
    try:
        with file:
            async for data in request.stream():
                form.feed(data)
                if form.num_fresh >= _WRITE_BYTES:
                    await asyncio.to_thread(file.write, form.take())
            form.finish()
            await asyncio.to_thread(file.write, form.take())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def plain_name(given: bytes) -> str:
    """What a client calls its file: shown, and never used as a path."""
    text = _CONTROL.sub("", given.decode("utf-8", errors="replace"))
    return text[-_MAX_NAME_LENGTH:] or "upload"
