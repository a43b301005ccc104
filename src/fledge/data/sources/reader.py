"""One source of the recipe, row by row."""

from collections.abc import Iterator

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import BadRows, SourceSettings
from fledge.contracts.progress import Progress
from fledge.data.sources.report import SourceReport


class SourceReader:
    """The conversations of a source, once, in order; `report` is valid at any moment.

    Going on after a `break` continues with the next row.
    """

    report: SourceReport

    def __iter__(self) -> Iterator[Conversation]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of open files; only needed when not all rows were read."""
        raise NotImplementedError


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
    raise NotImplementedError
