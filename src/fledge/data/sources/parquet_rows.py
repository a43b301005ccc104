"""Rows of parquet files, a few at a time; needs the extra `data`."""

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.data.sources.line_rows import RawRow
from fledge.data.sources.problems import RowProblem, StreamProblem

MAGIC = b"PAR1"
_BATCH_ROWS = 128
_BUFFER_BYTES = 1 << 20
"""Column chunks are read through a buffer of this size instead of whole."""

_DAMAGE = (OSError, ValueError, NotImplementedError)  # pyarrow's own errors are among these


def read_parquet(
    stream: BinaryIO,
    *,
    name: str,
    num_bytes: int,
    wanted: frozenset[str],
    on_bytes: Callable[[int], None],
) -> Iterator[RawRow]:
    """Rows as dictionaries; fields without a value are left out, as JSON would.

    Columns that are not wanted are not read, unless there are no others.
    """
    file = _open(stream, name)
    columns = [column for column in file.schema_arrow.names if column in wanted] or None
    number = counted_bytes = 0
    try:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                for row in _rows(batch):
                    number += 1
                    is_bad = isinstance(row, RowProblem)
                    yield RawRow(number, None, row) if is_bad else RawRow(number, row)
            reached_bytes = num_bytes * (group + 1) // file.num_row_groups
            on_bytes(reached_bytes - counted_bytes)
            counted_bytes = reached_bytes
    except _DAMAGE as error:
        problem = StreamProblem("damaged file", f"the file is damaged here: {_reason(error)}")
        yield RawRow(number + 1, None, problem)


def _open(stream: BinaryIO, name: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{name} is a parquet file, and reading those needs pyarrow: "
            "pip install 'fledge[data]'."
        ) from error
    try:
        return parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except _DAMAGE as error:
        raise ArtifactError(
            f"{name} begins like a parquet file and is none, or not all of it: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") + "."


def _rows(batch: Any) -> Iterator[Any]:
    """Dictionaries, or problems in their place."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # in one of them
        rows = [_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
    return map(_without_none, rows)


def _row(single: Any) -> Any:
    try:
        return single.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowProblem("not UTF-8", f"not UTF-8: {error.reason}")


def _without_none(value: Any) -> Any:
    """Structs of parquet have all fields of all rows; those a row does not have are None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
