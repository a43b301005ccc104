"""Has this prompt been seen before: exactly, or nearly, among any number of rows on disk."""

from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import DuplicateSettings

Duplicate = Literal["exact", "near"]


class DuplicateIndex:
    """Prompts seen so far, in one file; nothing is durable before `commit`."""

    def __init__(self, path: Path, settings: DuplicateSettings) -> None:
        raise NotImplementedError

    def check(self, conversation: Conversation) -> Duplicate | None:
        """Whether an earlier row asks the same; a new one is remembered."""
        raise NotImplementedError

    def commit(self, position: dict[str, Any]) -> None:
        """Make everything since the last commit durable, together with where the caller is."""
        raise NotImplementedError

    @property
    def position(self) -> dict[str, Any] | None:
        """What the last commit stored."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Rows remembered, those since the last commit included."""
        raise NotImplementedError

    @property
    def bytes_per_row(self) -> float:
        """Bytes of the file over rows remembered; 0 while there are none."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the file; what was not committed is forgotten."""
        raise NotImplementedError

    def __enter__(self) -> "DuplicateIndex":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self.close()
