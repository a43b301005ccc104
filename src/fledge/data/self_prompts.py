"""Prompts that the target writes itself: no third party's licence, no personal data.

A chat target is sampled from the place where its template has the user begin to write; topic and
language are given in a system prompt. Where the template has no place for one, and for targets
without a template, some texts are begun for it instead.

Tries are numbered. Everything about a try, its seed included, follows from the run's seed, the
source's name and its number, so the same run yields the same rows.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import date
from functools import partial
from pathlib import Path

import xxhash

from fledge.contracts.conversation import Conversation, Message, Origin
from fledge.contracts.data_settings import SELF, SelfSettings, SourceSettings, decisive_self
from fledge.contracts.errors import ConfigError
from fledge.contracts.outputs import Completion
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.sampling import SamplingParams
from fledge.data.prompt_text import fold, split_words
from fledge.data.self_filter import DiversityMeter, SelfPromptReport, find_flaw
from fledge.data.self_journal import Draft, SelfJournal
from fledge.data.self_tries import HINT, Try, TryPlanner
from fledge.data.token_meter import Question, TokenMeter, answer_batches
from fledge.data.user_turns import UserTurns
from fledge.engine.engine import Engine

_BATCH_TRIES = (64, 1024)
_BATCH_SHARE = 16
"""Tries are asked for together, and written down together: between so few and so many, a sixteenth
of the rows otherwise. Large runs are for machines that answer many at once."""

_TRIES_PER_ROW = 5
"""A target that needs more tries than this is not fit for writing prompts."""

_SPARE_TRIES = 64
_DAY = date(2025, 1, 1)
"""What templates that write today's date are told: rows must not depend on the day."""


class SelfPromptWriter:
    """Asks a target for user prompts by sampling where its chat template puts them.

    With a `journal`, a directory, every batch of tries is written down; a run that was interrupted
    reads it instead of asking again, and yields the same rows from the first on.
    """

    def __init__(
        self, engine: Engine, *, progress: Progress | None = None, journal: Path | None = None
    ) -> None:
        if engine.target.tokenizer is None:
            raise ConfigError("this target has no tokenizer, so it cannot write prompts.")
        self._engine = engine
        self._tokenizer = engine.target.tokenizer.on_day(_DAY)
        self._progress = progress or SilentProgress()
        self._journal = journal
        self._turns = UserTurns(self._tokenizer)
        self._marks = {*self._turns.marks, HINT}
        self._planner = TryPlanner(self._turns, self._tokenizer, engine.target.context_len)
        self._meters: dict[str, DiversityMeter] = {}

    def __call__(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        examples: Sequence[str] = (),
    ) -> Iterator[Conversation]:
        """`settings.rows` usable prompts that all differ, or fewer when tries run out.

        With `examples` none of them is among these.
        """
        if examples and self._turns.is_raw:
            raise ConfigError(
                f"source {source.name} is to be like {settings.like}, which takes a chat template, "
                "and this target has none; leave `like` out."
            )
        # A special token in a text would be read as one.
        examples = [text for text in examples if not any(mark in text for mark in self._marks)]
        if settings.like and len(examples) < settings.shown:
            raise ConfigError(
                f"source {source.name} is to be like {settings.like}, which has {len(examples)} "
                f"prompts without special tokens of the target, and {settings.shown} are to be "
                "shown each time; name another source, or lower `shown`."
            )
        meter = self._meters[source.name] = DiversityMeter()
        known = {_hashed(split_words(fold(text))) for text in examples}
        max_tries = _TRIES_PER_ROW * settings.rows + _SPARE_TRIES
        label = f"asking the target for prompts ({source.name})"
        with (
            self._progress.task(label, settings.rows, unit="rows") as task,
            # What was asked ahead is taken back at the end.
            closing(
                self._drafts(source, settings, seed, examples, max_tries, TokenMeter(task, label))
            ) as drafts,
        ):
            for attempt, draft in drafts:
                text = self._accept(attempt, draft, meter, known)
                if text is not None:
                    task.advance(1)
                    yield _as_row(source, attempt, text, meter)
                if meter.kept == settings.rows:
                    return
        self._progress.note(
            f"source {source.name}: the target wrote {meter.kept} usable prompts in {meter.tries} "
            f"tries, and {settings.rows} were asked for; going on with those. Not usable were "
            f"{meter.report().flaws}."
        )

    def report(self, source_name: str) -> SelfPromptReport:
        """How the tries for a source went so far."""
        return self._meters[source_name].report()

    def _drafts(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        examples: Sequence[str],
        max_tries: int,
        said: TokenMeter,
    ) -> Generator[tuple[Try, Draft]]:
        """Tries and what came of them, from the journal as far as it goes."""
        fewest, most = _BATCH_TRIES
        size = min(max(fewest, min(settings.rows // _BATCH_SHARE, most)), settings.rows)
        asked = (source, settings, seed)
        batches = (
            [self._planner.plan(*asked, number, examples) for number in range(start, start + size)]
            for start in range(0, max_tries, size)
        )
        journal = self._open_journal(source, settings, seed)
        if journal is not None:
            for drafts in journal.read():
                yield from zip(next(batches), drafts, strict=True)
        waiting = deque[list[Try]]()
        for completions in answer_batches(
            self._engine,
            self._questions(batches, settings, waiting),
            partial(self._wants_more, source, settings),
            said,
        ):
            tries = waiting.popleft()
            drafts = [self._draft(*pair) for pair in zip(tries, completions, strict=True)]
            if journal is not None:
                journal.write(drafts)
            yield from zip(tries, drafts, strict=True)

    def _wants_more(self, source: SourceSettings, settings: SelfSettings, num_asked: int) -> bool:
        """Whether so many tries are likely too few, by the share of those before that were kept."""
        meter = self._meters[source.name]
        share = meter.kept / meter.tries if meter.tries else 1.0
        return meter.kept + share * num_asked < settings.rows

    def _open_journal(
        self, source: SourceSettings, settings: SelfSettings, seed: int
    ) -> SelfJournal | None:
        if self._journal is None:
            return None
        basis = {
            "source": source.name,
            "seed": seed,
            "settings": decisive_self(settings),
            "tokenizer": self._tokenizer.identity["sha256"],
        }
        return SelfJournal(self._journal / f"{source.name}.jsonl", basis)

    def _questions(
        self, batches: Iterable[list[Try]], settings: SelfSettings, waiting: deque[list[Try]]
    ) -> Iterator[list[Question]]:
        """What to ask for tries, batch by batch; those that were asked wait for their answers."""
        for tries in batches:
            waiting.append(tries)
            yield [(self._prompt(one), self._params(one, settings)) for one in tries]

    @staticmethod
    def _prompt(attempt: Try) -> list[int]:
        return [*attempt.lead_ids, *attempt.opener_ids]

    def _params(self, attempt: Try, settings: SelfSettings) -> SamplingParams:
        return SamplingParams(
            max_tokens=attempt.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=attempt.seed,
            stop=self._turns.stop_texts,
            stop_token_ids=self._turns.stop_token_ids,
        )

    def _draft(self, attempt: Try, completion: Completion) -> Draft:
        """The text of a try, what it was begun with included."""
        token_ids = completion.token_ids
        endings = {*self._turns.stop_token_ids, *self._engine.target.eos_token_ids}
        if token_ids and token_ids[-1] in endings:
            token_ids = token_ids[:-1]
        # Special tokens are kept in the text: they are how debris is seen.
        text = self._tokenizer.decode([*attempt.opener_ids, *token_ids], keeps_special_tokens=True)
        for stop in self._turns.stop_texts:
            text = text.split(stop)[0]
        return Draft(text, completion.finish_reason == "length")

    def _accept(
        self, attempt: Try, draft: Draft, meter: DiversityMeter, known: set[int]
    ) -> str | None:
        """The prompt, when a try gave one that is new."""
        text = draft.text
        if draft.is_cut and self._turns.is_raw:
            text = _without_last_word(text)
        elif draft.is_cut:
            meter.reject("cut off")
            return None
        text = text.strip()
        flaw = find_flaw(text, marks=self._marks, scripts=attempt.language.scripts or None)
        if flaw is None and len(text) <= len(attempt.opener):
            flaw = "short"
        if flaw is not None:
            meter.reject(flaw)
            return None
        words = split_words(fold(text))
        hashed = _hashed(words)
        if hashed in known:
            meter.reject("known")
            return None
        known.add(hashed)
        meter.keep(words)
        return text


def _hashed(words: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest(" ".join(words).encode())


def _without_last_word(text: str) -> str:
    """A text that ran into the limit may end inside a word, or inside a character."""
    whole, space, _ = text.rstrip("\ufffd").rpartition(" ")
    return whole if space else text.rstrip("\ufffd")


def _as_row(source: SourceSettings, attempt: Try, text: str, meter: DiversityMeter) -> Conversation:
    messages: list[Message] = [{"role": "user", "content": text}]
    if attempt.system:
        messages.insert(0, {"role": "system", "content": attempt.system})
    return Conversation(
        id=f"{source.name}/{meter.kept}",
        messages=tuple(messages),
        origin=Origin(
            source=source.name,
            licence=source.licence,
            file=SELF,
            row=meter.kept,
            row_id=f"try {meter.tries}",
        ),
    )
