"""Which rows are open, done or failed; hands out dialogues and takes what came of them.

For each row it holds one byte and one offset into the journal, so memory does not grow with the
answers: 9 bytes per row, beside the 12 of the input's index. A reply counts when it is in the
journal. Rows that the server refused are asked again by the next run: what was wrong may have been
mended meanwhile.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fledge.contracts.errors import FetchError, RequestError
from fledge.contracts.progress import Task
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.input_rows import InputRows
from fledge.data.regenerate.dialogue import Dialogue, Reply
from fledge.data.regenerate.journal import NOWHERE, Entry, Journal

FIRST_REFUSALS = 16
"""So many rows refused before any was answered: something is wrong with all of them."""

SILENCES_IN_A_ROW = 4
"""So many rows without an answer, all retries used, and none answered between: the server is
gone."""

_OPEN, _DONE, _FAILED, _POSTPONED = range(4)


class Worklist:
    """The rows of one run."""

    def __init__(
        self,
        rows: InputRows,
        journal: Journal,
        settings: RegenerateSettings,
        model: str,
        *,
        gives_up: bool = False,
    ) -> None:
        """With `gives_up`, rows without an answer do not stop a server that can be reached."""
        self._rows = rows
        self._journal = journal
        self._settings = settings
        self._model = model
        self._gives_up = gives_up
        self._states = bytearray(len(rows))
        self._newest = array("q", [NOWHERE]) * len(rows)
        self._failures: dict[int, int] = {}
        self._num_silent = 0
        self._last_reason = ""
        self.has_answers = False
        """Some row was answered, in this run or before."""

        self.task: Task | None = None
        """Told of each row that needs no more asking."""

        self.batches: list[dict[str, Any]] = []
        """What the Batch API's way wrote down for itself."""

        self.num_damaged = 0
        for entry in journal.entries():
            self._load(entry)

    def _load(self, entry: Entry | None) -> None:
        if entry is None:
            self.num_damaged += 1
        elif entry.kind == "batch":
            self.batches.append(entry.payload)
        # An entry behind a damaged one of its row is asked again with it.
        elif entry.kind in ("turn", "end") and entry.before == self._newest[entry.row]:
            self.has_answers = True
            self._newest[entry.row] = entry.offset
            self._states[entry.row] = _DONE if entry.kind == "end" else _OPEN

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def directory(self) -> Path:
        """Where the journal is, and files that are needed until the end."""
        return self._journal.path.parent

    @property
    def num_done(self) -> int:
        return self._states.count(_DONE)

    @property
    def num_open(self) -> int:
        return len(self) - self.num_done - len(self._failures)

    @property
    def num_failed(self) -> int:
        return len(self._failures)

    def is_open(self, row: int) -> bool:
        return self._states[row] == _OPEN

    def is_done(self, row: int) -> bool:
        return self._states[row] == _DONE

    def pending(self) -> Iterator[Dialogue]:
        """Open rows in the order of the input, each as far as it has got."""
        row = 0
        while (row := self._states.find(_OPEN, row)) >= 0:
            dialogue = self.dialogue(row)
            if dialogue.is_over:
                self._close(row, _DONE)
            else:
                yield dialogue
            row += 1

    def dialogue(self, row: int) -> Dialogue:
        """A row with the answers that it has."""
        dialogue = Dialogue(row, self._rows[row], self._settings, self._model)
        for reply in self._replies(row):
            dialogue.take(reply)
        return dialogue

    def _replies(self, row: int) -> list[Reply]:
        replies = []
        offset = self._newest[row]
        while offset != NOWHERE:
            entry = self._journal.read(offset)
            replies.append(_reply(entry.payload))
            offset = entry.before
        return replies[::-1]

    def record(self, dialogue: Dialogue, reply: Reply) -> None:
        """An answer came."""
        row = dialogue.row
        assert self._states[row] == _OPEN, "a finished row was asked again"
        dialogue.take(reply)
        kind = "end" if dialogue.is_over else "turn"
        payload: dict[str, Any] = {
            "message": reply.message,
            "finish_reason": reply.finish_reason,
        }
        if reply.token_ids is not None:
            payload["token_ids"] = list(reply.token_ids)
        self._newest[row] = self._journal.append(kind, row, self._newest[row], payload)
        self._num_silent = 0
        self.has_answers = True
        if dialogue.is_over:
            self._close(row, _DONE)

    def fail(self, dialogue: Dialogue, reason: str) -> None:
        """The row cannot be answered, and asking again would change nothing."""
        self._write_failure(dialogue, reason)
        self._close(dialogue.row, _FAILED)
        if self.num_failed >= FIRST_REFUSALS and not self.has_answers:
            raise self.all_refused()

    def all_refused(self) -> RequestError:
        count = f"the first {self.num_failed} rows" if self.num_failed > 1 else "the only row"
        return RequestError(
            f"{count} got no answer, so something is wrong with all of them: {self._last_reason}. "
            "Mend it and run the same command again."
        )

    def postpone(self, dialogue: Dialogue, reason: str, *, is_reachable: bool) -> None:
        """No answer, all retries used; it is asked again when the others have had their turn."""
        self._states[dialogue.row] = _POSTPONED
        self._last_reason = reason
        self._num_silent += not (self._gives_up and is_reachable)
        if self._num_silent >= SILENCES_IN_A_ROW:
            raise self.unanswered()

    def unanswered(self) -> FetchError:
        return FetchError(
            f"no answer from {self._last_reason}. {self.num_done:,} of {len(self):,} rows are "
            "answered and kept; run the same command again to go on."
        )

    @property
    def num_postponed(self) -> int:
        return self._states.count(_POSTPONED)

    def reopen(self) -> None:
        """Postponed rows may be asked again."""
        self._states = self._states.replace(bytes([_POSTPONED]), bytes([_OPEN]))

    def give_up(self) -> None:
        """Count postponed rows as failed."""
        row = 0
        while (row := self._states.find(_POSTPONED, row)) >= 0:
            self._write_failure(self.dialogue(row), self._last_reason)
            self._close(row, _FAILED)

    def failure(self, row: int) -> str | None:
        """Why a row has no answer; None when it has one."""
        offset = self._failures.get(row)
        return None if offset is None else str(self._journal.read(offset).payload["reason"])

    def note_batch(self, record: dict[str, Any]) -> None:
        """Write down what the Batch API's way must know after a kill, and have the disk hold it."""
        self._journal.append("batch", 0, NOWHERE, record)
        self._journal.commit()
        self.batches.append(record)

    def _write_failure(self, dialogue: Dialogue, reason: str) -> None:
        self._last_reason = reason
        record = {"id": dialogue.id, "reason": reason}
        self._failures[dialogue.row] = self._journal.append("failed", dialogue.row, NOWHERE, record)

    def _close(self, row: int, state: int) -> None:
        self._states[row] = state
        if self.task is not None:
            self.task.advance(1)


def _reply(payload: dict[str, Any]) -> Reply:
    token_ids = payload.get("token_ids")
    return Reply(
        message=payload["message"],
        finish_reason=payload["finish_reason"],
        token_ids=None if token_ids is None else tuple(token_ids),
    )
