"""Who tokenizes rows: this process, or several others with a tokenizer each."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from fledge.contracts.conversation import Conversation
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.data.tokenize_rows import RowTokenizer, TokenizedRow
from fledge.data.worker_pool import WorkerPool, batches_of
from fledge.models.chat_spans import TurnFinder
from fledge.models.target_facts import TargetFacts, read_facts
from fledge.store.capacity import num_cores

_ROWS_AT_ONCE = 256
_WORTH_WORKERS_S = 20.0
"""Work from which other processes pay: each reads the tokenizer first, which takes seconds."""

_MOST_WORKERS = 8
"""Unless asked for: each takes some hundred megabytes, and one process reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerChoice:
    """What a process has to know to make a tokenizer like ours."""

    directory: Path
    day: date | None
    settings: TokenizeSettings
    is_raw: bool
    """Answers continue prompts as they stand, without a chat template."""

    def row_tokenizer(self, facts: TargetFacts) -> RowTokenizer:
        finder = TurnFinder(facts.tokenizer, facts.eos_token_ids, is_raw=self.is_raw)
        return RowTokenizer(facts.tokenizer, finder, self.settings)


def choose_workers(seconds: float) -> int:
    """Processes for work that one would need so long for."""
    num_others = min(num_cores() - 1, _MOST_WORKERS)  # reading and writing keep one core busy
    return num_others if num_others > 1 and seconds >= _WORTH_WORKERS_S else 1


def tokenize_batches(
    rows: Iterable[Conversation], choice: TokenizerChoice, facts: TargetFacts, num_workers: int
) -> Iterator[list[TokenizedRow]]:
    """The rows in their order, some at a time; the same with any number of processes."""
    batches = batches_of(rows, _ROWS_AT_ONCE)
    if num_workers == 1:
        yield from map(choice.row_tokenizer(facts).tokenize, batches)
        return
    pool: WorkerPool[Conversation, TokenizedRow] = WorkerPool(
        num_workers, "tokenizes rows", _make_tokenizer, choice
    )
    with closing(pool):
        yield from pool.map(batches)


def _make_tokenizer(
    choice: TokenizerChoice,
) -> Callable[[list[Conversation]], list[TokenizedRow]]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the others have the other cores
    return choice.row_tokenizer(read_facts(choice.directory, day=choice.day)).tokenize
