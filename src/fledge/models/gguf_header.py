"""Reads and checks the header of a GGUF file in well under a second.

The `gguf` package's reader takes many seconds for a large vocabulary and fails in odd ways on a
truncated file; this one reads only the arrays asked for and says what is wrong with the file.
"""

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from fledge.contracts.errors import ArtifactError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), ("<" + code for code in "BbHhIif?Qqd"), strict=True)
)
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What conversion needs to know about a GGUF file before reading its tensors."""

    metadata: dict[str, object]
    """Scalars and texts by key; an array is only its length, unless it was asked for."""

    tensor_names: tuple[str, ...]
    num_values: int
    """Numbers in all tensors together."""

    required_bytes: int
    """Size the file must at least have for its tensors to be in it."""

    spans: dict[str, slice]
    """Bytes of each key with its value."""

    tensor_table: slice
    """Bytes of the list of tensors, between the last key and the padding before the data."""

    alignment: int
    """The data begins at a multiple of it."""

    @property
    def data_start(self) -> int:
        return align(self.tensor_table.stop, self.alignment)

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def float32_bytes(self) -> int:
        """Size of all tensors once dequantised."""
        return self.num_values * _FLOAT32_BYTES

    @property
    def quantisation(self) -> str:
        """The file's own name for how it is packed, such as `Q4_K_M`."""
        try:
            kind = LlamaFileType(self.metadata["general.file_type"])
        except (KeyError, ValueError):
            return "unknown quantisation"
        return str(kind.name).removeprefix("MOSTLY_").removeprefix("ALL_")

    def token_ids(self, *roles: str) -> tuple[int, ...]:
        """Ids of the special tokens the file names, in the order asked for, each once."""
        found = (self.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles)
        return tuple(dict.fromkeys(number for number in found if isinstance(number, int)))


def read_gguf_header(path: Path, arrays: Collection[str] = ()) -> GgufHeader:
    """The header of a GGUF file with the named arrays; refuses a foreign, cut or split file."""
    size = path.stat().st_size
    if size < len(MAGIC) + 20:
        raise ArtifactError(
            f"{path} is not a GGUF file: it has only {size} bytes. Fetch or copy it again."
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise ArtifactError(
                f"{path} is not a GGUF file: it begins with {data[: len(MAGIC)]!r} instead of "
                f"{MAGIC!r}. Give a GGUF file or a directory in Hugging Face format."
            )
        header = _parse(path, data, arrays)
    _check(path, header, size)
    return header


def _parse(path: Path, data: mmap.mmap, arrays: Collection[str]) -> GgufHeader:
    cursor = _Cursor(data, len(MAGIC))
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ArtifactError(
            f"{path} is GGUF version {version}; versions {_VERSIONS} can be read. Convert it with "
            "a current llama.cpp, or give the model's Hugging Face directory."
        )
    try:
        return _parse_body(cursor, arrays)
    except (struct.error, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} ends or is damaged inside its header: it has {len(data)} bytes, and byte "
            f"{cursor.position} cannot be read ({error}). Fetch or copy it again."
        ) from error
    except KeyError as error:
        raise ArtifactError(
            f"{path} uses type number {error} at byte {cursor.position}, which is unknown here: "
            "the file is damaged or newer than the installed gguf package."
        ) from error


def _parse_body(cursor: "_Cursor", arrays: Collection[str]) -> GgufHeader:
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, object] = {}
    spans: dict[str, slice] = {}
    for _ in range(num_keys):
        start, key = cursor.position, cursor.text()
        metadata[key] = cursor.value(cursor.scalar("<I"), key in arrays)
        spans[key] = slice(start, cursor.position)
    table_start = cursor.position
    names, num_values, data_len = [], 0, 0
    for _ in range(num_tensors):
        names.append(cursor.text())
        count = prod(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
        kind, offset = cursor.scalar("<I"), cursor.scalar("<Q")
        num_values += count
        data_len = max(data_len, offset + _tensor_bytes(kind, count))
    stated = metadata.get("general.alignment")
    alignment = stated if isinstance(stated, int) and stated > 0 else _DEFAULT_ALIGNMENT
    return GgufHeader(
        metadata=metadata,
        tensor_names=tuple(names),
        num_values=num_values,
        required_bytes=align(cursor.position, alignment) + data_len,
        spans=spans,
        tensor_table=slice(table_start, cursor.position),
        alignment=alignment,
    )


def align(position: int, step: int) -> int:
    """The first multiple of `step` at or behind a position."""
    return -(-position // step) * step


def _tensor_bytes(kind: int, count: int) -> int:
    try:
        sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError:
        raise KeyError(kind) from None
    block_len, block_bytes = sizes
    return count // block_len * block_bytes


def _check(path: Path, header: GgufHeader, size: int) -> None:
    if size < header.required_bytes:
        raise ArtifactError(
            f"{path} is truncated: it has {size} bytes, its header describes "
            f"{header.required_bytes}. Fetch or copy it again."
        )
    if "general.architecture" not in header.metadata:
        raise ArtifactError(
            f"{path} does not say which architecture it holds (no general.architecture). "
            "Give the model's Hugging Face directory instead."
        )
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ArtifactError(
            f"{path} is one of {parts} parts of a split model. Join them first with "
            "`llama-gguf-split --merge`."
        )


class _Cursor:
    """Walks over the header's values."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, code: str) -> int:
        value: int = struct.unpack_from(code, self._data, self.position)[0]
        self.position += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        self._skip(length)
        return self._data[self.position - length : self.position].decode()

    def value(self, kind: int, keep_array: bool = False) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, length = self.scalar("<I"), self.scalar("<Q")
            return self._array(kind, length) if keep_array else self._skip_array(kind, length)
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[object]:
        return [self.value(kind) for _ in range(length)]

    def _skip_array(self, kind: int, length: int) -> int:
        if kind in _SCALARS:
            self._skip(struct.calcsize(_SCALARS[kind]) * length)
        elif kind == _STRING:
            for _ in range(length):
                self._skip(self.scalar("<Q"))
        else:
            for _ in range(length):
                self.value(kind)
        return length

    def _skip(self, length: int) -> None:
        if self.position + length > len(self._data):
            raise struct.error(f"{length} bytes are expected there")
        self.position += length
