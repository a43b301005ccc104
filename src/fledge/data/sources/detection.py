"""Which schema a file has, told by its first rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fledge.contracts.data_settings import SourceFormat
from fledge.contracts.errors import ConfigError
from fledge.data.sources.line_rows import RawRow
from fledge.data.sources.schemas import SCHEMAS, Schema, schema_of

_SAMPLE_ROWS = 16
_SAMPLE_BYTES = 1 << 20
_MAX_SHOWN_FIELDS = 20
_MAX_SHOWN_CHARS = 60


def take_sample(first: RawRow, rows: Iterator[RawRow]) -> list[RawRow]:
    """A few rows, fewer where they are long."""
    sample = [first]
    num_bytes = first.num_bytes
    while len(sample) < _SAMPLE_ROWS and num_bytes < _SAMPLE_BYTES:
        row = next(rows, None)
        if row is None:
            break
        sample.append(row)
        num_bytes += row.num_bytes
    return sample


def detect_schema(file: str, sample: Sequence[RawRow], wanted: SourceFormat) -> Schema:
    """The schema that most rows have; none is an error that shows what was found."""
    values = [row.value for row in sample if row.problem is None]
    found = [schema for value in values if (schema := schema_of(value, wanted)) is not None]
    if found:
        counts = Counter(schema.sentence for schema in found)
        best = counts.most_common(1)[0][0]
        return next(schema for schema in found if schema.sentence == best)
    if wanted != "auto":
        raise ConfigError(
            f"{file} is said to have the format {wanted} ({SCHEMAS[wanted]}), and its rows have "
            f'{_describe(values)}. Name another format, or leave it out for "auto".'
        )
    known = "; ".join(f"{name}: {sentence}" for name, sentence in SCHEMAS.items())
    raise ConfigError(
        f"{file} has no schema that fledge knows: its rows have {_describe(values)}. Known are "
        f"{known}. Rename the fields, or leave the file out."
    )


def _describe(values: Sequence[Any]) -> str:
    fields = list(
        dict.fromkeys(key for value in values if isinstance(value, dict) for key in value)
    )
    if not fields:
        kinds = sorted({type(value).__name__ for value in values})
        return f"no fields (they are of type {', '.join(kinds)})"
    shown = ", ".join(field[:_MAX_SHOWN_CHARS] for field in fields[:_MAX_SHOWN_FIELDS])
    return f"the fields {shown}{' and more' if len(fields) > _MAX_SHOWN_FIELDS else ''}"
