"""One source of the recipe, row by row."""

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import BadRows, SourceSettings
from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import Progress, Task
from fledge.data.sources import cloud, hub_datasets
from fledge.data.sources.checks import check_conversation
from fledge.data.sources.detection import detect_schema, take_sample
from fledge.data.sources.layouts import open_rows, row_limit_bytes
from fledge.data.sources.line_rows import RawRow
from fledge.data.sources.places import SourceFile, find_local, without_repeats
from fledge.data.sources.problems import RowProblem, StreamProblem
from fledge.data.sources.report import BadRow, FileSchema, SourceReport
from fledge.data.sources.schema_parsers import Draft
from fledge.data.sources.schemas import ID_FIELDS, WANTED_FIELDS, Schema
from fledge.store.object_store import SCHEMES

_MAX_NOTED_FILES = 20
"""Of sources with more files only those are noted whose schema is new."""

_MAX_SHOWN_FILES = 3


class SourceReader:
    """The conversations of a source, once, in order; `report` is valid at any moment.

    A row here is one conversation or one bad row, numbered in the order they are read. Going on
    after a `break` continues with the next row.
    """

    def __init__(
        self,
        settings: SourceSettings,
        files: tuple[SourceFile, ...],
        *,
        on_bad_row: BadRows,
        max_turn_chars: int,
        progress: Progress,
        skip_rows: int,
    ) -> None:
        self.files = files
        self.report = SourceReport()
        self._settings = settings
        self._on_bad_row = on_bad_row
        self._max_turn_chars = max_turn_chars
        self._progress = progress
        self._skip_rows = skip_rows
        self._conversations = self._read_all()

    def __iter__(self) -> Iterator[Conversation]:
        return self._conversations

    def close(self) -> None:
        """Let go of open files; only needed when not all rows were read."""
        self._conversations.close()

    def _read_all(self) -> Generator[Conversation, None, None]:
        total_bytes = sum(file.size for file in self.files)
        with self._progress.task(f"reading {self._settings.name}", total_bytes) as task:
            for file in self.files:
                try:
                    with closing(file.open()) as stream:
                        rows, row_word = open_rows(
                            file,
                            stream,
                            is_prompt_list=self._settings.format == "prompts",
                            wanted_fields=WANTED_FIELDS,
                            max_row_bytes=row_limit_bytes(self._max_turn_chars),
                            on_bytes=partial(self._count_bytes, task),
                        )
                        yield from self._read_file(file.name, rows, row_word)
                except OSError as error:
                    raise ArtifactError(f"{file.name} cannot be read: {error}.") from error
        self._conclude()

    def _count_bytes(self, task: Task, num_bytes: int) -> None:
        self.report.bytes_read += num_bytes
        task.advance(num_bytes)

    def _read_file(
        self, file: str, rows: Iterator[RawRow], row_word: str
    ) -> Iterator[Conversation]:
        schema: Schema | None = None
        for row in rows:
            if row.problem is not None:
                self._reject(file, row.number, row_word, row.problem)
                continue
            sample = take_sample(row, rows)
            schema = detect_schema(file, sample, self._settings.format)
            self._note_schema(file, schema)
            break
        if schema is None:
            return
        for row in chain(sample, rows):
            try:
                yield from self._read_row(file, row, row_word, schema)
            except RowProblem as problem:
                self._reject(file, row.number, row_word, problem)

    def _read_row(
        self, file: str, row: RawRow, row_word: str, schema: Schema
    ) -> Iterator[Conversation]:
        """The conversations of a row: one, or one for each instance of a task."""
        if row.problem is not None:
            raise row.problem
        row_id = _row_id(row.value)
        if row_id is not None:
            self.report.ids.add(row_id)
        origin = Origin(
            source=self._settings.name,
            licence=self._settings.licence,
            file=file,
            row=row.number,
            row_id=row_id,
        )
        for draft in _parse(schema, row.value):
            try:
                check_conversation(draft.messages, draft.tools, self._max_turn_chars)
            except RowProblem as problem:
                self._reject(file, row.number, row_word, problem)
                continue
            self.report.rows_read += 1
            if self.report.rows_read > self._skip_rows:
                yield Conversation(
                    id=f"{self._settings.name}/{self.report.rows_read}",
                    messages=tuple(draft.messages),
                    origin=origin,
                    tools=draft.tools,
                )

    def _reject(self, file: str, number: int, row_word: str, problem: RowProblem) -> None:
        self.report.rows_read += 1
        self.report.add_bad(BadRow(file, number, problem.detail), problem.kind)
        sentence = f"{file}, {row_word} {number}: {problem.detail}."
        if self._on_bad_row == "stop":
            raise ArtifactError(
                f'{sentence} Repair it, or set prepare.on_bad_row = "skip" to leave bad rows out.'
            )
        if isinstance(problem, StreamProblem):
            self._progress.note(f"{sentence} The rest of the file is left out.")

    def _note_schema(self, file: str, schema: Schema) -> None:
        known = {one.sentence for one in self.report.schemas.values()}
        if len(self.files) <= _MAX_NOTED_FILES or schema.sentence not in known:
            self._progress.note(f"{file}: {schema.sentence}")
        self.report.schemas[file] = FileSchema(schema.name, schema.sentence)

    def _conclude(self) -> None:
        """A source that gave nothing is an error; what was left out is said."""
        report, name = self.report, self._settings.name
        if not report.rows_read:
            names = ", ".join(file.name for file in self.files[:_MAX_SHOWN_FILES])
            more = len(self.files) - _MAX_SHOWN_FILES
            names += f" and {more} more" if more > 0 else ""
            raise ArtifactError(f"source {name} has no rows: nothing is in {names}.")
        if report.rows_bad == report.rows_read:
            first = report.bad[0]
            raise ArtifactError(
                f"all {report.rows_read:,} rows of source {name} are bad; the first is number "
                f"{first.line} of {first.file}: {first.reason}."
            )
        if report.rows_bad:
            reasons = ", ".join(f"{kind}: {n:,}" for kind, n in report.bad_by_reason.most_common())
            self._progress.note(
                f"{name}: {report.rows_bad:,} of {report.rows_read:,} rows left out ({reasons})"
            )


def open_source(
    settings: SourceSettings,
    *,
    on_bad_row: BadRows,
    max_turn_chars: int,
    progress: Progress,
    skip_rows: int = 0,
) -> SourceReader:
    """Find the files of a source; what does not exist or cannot be reached is an error here.

    The first `skip_rows` rows are read and counted as ever but not handed out, so that the report
    of a resumed reader equals that of an unbroken one.
    """
    found = chain.from_iterable(_find(path, progress) for path in settings.path)
    return SourceReader(
        settings,
        without_repeats(found),
        on_bad_row=on_bad_row,
        max_turn_chars=max_turn_chars,
        progress=progress,
        skip_rows=skip_rows,
    )


def _find(path: str, progress: Progress) -> list[SourceFile]:
    scheme = path.partition("://")[0] if "://" in path else ""
    if scheme == hub_datasets.SCHEME:
        return hub_datasets.find_hub_files(path, progress)
    if scheme in SCHEMES:
        return cloud.find_objects(path)
    if scheme:
        known = ", ".join(f"{one}://" for one in (hub_datasets.SCHEME, *SCHEMES))
        raise ConfigError(f"{path!r} cannot be read; known are local paths and {known}.")
    return find_local(path)


def _parse(schema: Schema, value: Any) -> list[Draft]:
    try:
        return schema.parse(value)
    except RecursionError as error:
        raise RowProblem("nested too deeply", "it is nested too deeply") from error


def _row_id(value: Any) -> str | None:
    """The id that a row brought along."""
    if not isinstance(value, dict):
        return None
    found = next((value[field] for field in ID_FIELDS if field in value), None)
    is_id = isinstance(found, str | int) and not isinstance(found, bool) and found != ""
    return str(found) if is_id else None
