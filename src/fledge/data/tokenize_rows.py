"""From rows to masked samples, many rows at a time, each with a verdict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fledge.contracts.conversation import Conversation
from fledge.contracts.errors import MismatchError, RequestError
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.data.masks import (
    MaskedSample,
    TokenTurn,
    answers_with_loss,
    encode_turns,
    join_turns,
)
from fledge.data.tokenize_tally import TokenizeTally
from fledge.models.chat_spans import AnsweredTurn, TurnFinder, UnclearTurn
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal
from fledge.store.corpus_shard import Sample


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """The samples of one row, and what there is to count about it."""

    samples: tuple[Sample, ...]
    tally: TokenizeTally


class RowTokenizer:
    """Tokenizes rows for one target."""

    def __init__(
        self, tokenizer: TargetTokenizer, finder: TurnFinder, settings: TokenizeSettings
    ) -> None:
        self._tokenizer = tokenizer
        self._finder = finder
        self._settings = settings

    def tokenize(self, rows: Sequence[Conversation]) -> list[TokenizedRow]:
        """One result for each row, in order; together they are encoded faster."""
        found = [self._find(row) for row in rows]
        turns = [turn for one in found if not isinstance(one, RequestError) for turn in one]
        encoded = iter(encode_turns(self._tokenizer, turns, is_raw=self._finder.is_raw))
        return [
            self._result(
                row, one if isinstance(one, RequestError) else [next(encoded) for _ in one]
            )
            for row, one in zip(rows, found, strict=True)
        ]

    def _find(self, row: Conversation) -> list[AnsweredTurn] | RequestError:
        answers = answers_with_loss(row, as_recorded=self._settings.as_recorded)
        try:
            turns = self._finder.find(row.messages, row.tools, answers)
            _refuse_broken_text(turns)
        except (TemplateRefusal, UnclearTurn) as error:
            return error
        return turns

    def _result(
        self, row: Conversation, found: RequestError | Sequence[TokenTurn | UnclearTurn]
    ) -> TokenizedRow:
        tally = TokenizeTally(rows=1)
        if not isinstance(found, RequestError):
            broken = next((turn for turn in found if isinstance(turn, UnclearTurn)), None)
            found = broken or [turn for turn in found if isinstance(turn, TokenTurn)]
        if isinstance(found, RequestError):
            self._leave_out(row, found, tally)
            return TokenizedRow((), tally)
        spoken = [turn for turn in found if isinstance(turn, TokenTurn) and turn.answer_ids]
        samples = self._cut(join_turns(spoken), tally)
        if samples:
            source = row.origin.source
            tally.used = 1
            tally.turns = len(spoken)
            tally.samples = len(samples)
            tally.source_rows = {source: 1}
            tally.licences = {source: [row.origin.licence]}
            tally.end_ids = sorted(self._ends(spoken))
        elif spoken:
            tally.cut_away = 1
        else:
            tally.without_answer = 1
        return TokenizedRow(tuple(_as_stored(row, sample) for sample in samples), tally)

    def _leave_out(self, row: Conversation, error: RequestError, tally: TokenizeTally) -> None:
        """Count a row that gives nothing, or end the run over it."""
        is_unclear = isinstance(error, UnclearTurn)
        name = "on_unclear" if is_unclear else "on_refused"
        if getattr(self._settings, name) == "stop":
            origin = row.origin
            raise MismatchError(
                f"row {row.id} (row {origin.row} of {origin.file}) cannot be tokenized for this "
                f"target: {error}\nTo leave such rows out, go on with --set tokenize.{name}=skip."
            ) from error
        reason = error.reason if isinstance(error, UnclearTurn) else str(error)
        tally.count_reason(reason, row.id)
        if is_unclear:
            tally.unclear = 1
        else:
            tally.refused = 1

    def _cut(
        self, samples: Iterable[MaskedSample], tally: TokenizeTally
    ) -> tuple[MaskedSample, ...]:
        kept = []
        for whole in samples:
            sample = whole if self._settings.keep_loops else _without_loop(whole, tally)
            cut = sample.cut(self._settings.max_tokens)
            num_cut = len(sample.token_ids) - len(cut.token_ids)
            tally.samples_cut += num_cut > 0
            tally.tokens_cut += num_cut
            if cut.num_loss_tokens:
                kept.append(cut)
            else:
                tally.samples_dropped += 1
        return tuple(kept)

    def _ends(self, turns: Sequence[TokenTurn]) -> set[int]:
        """Special tokens that answers end with: the draft vocabulary must have them."""
        special = set(self._tokenizer.special_tokens.values())
        return {turn.answer_ids[-1] for turn in turns} & special


def _without_loop(sample: MaskedSample, tally: TokenizeTally) -> MaskedSample:
    """Circles are easy to guess: in full, they would be most of what is learned."""
    end = sample.loop_end()
    if end is None or end >= len(sample.token_ids):
        return sample
    tally.samples_looping += 1
    tally.tokens_looping += len(sample.token_ids) - end
    return sample.cut(end)


def _as_stored(row: Conversation, sample: MaskedSample) -> Sample:
    return Sample(
        token_ids=np.array(sample.token_ids, np.uint32),
        loss_mask=np.array(sample.loss_mask, np.bool_),
        row_id=row.id,
        source=row.origin.source,
        message=sample.message,
    )


def _refuse_broken_text(turns: Sequence[AnsweredTurn]) -> None:
    for turn in turns:
        try:
            (turn.prompt + turn.answer).encode()
        except UnicodeEncodeError as error:
            raise TemplateRefusal(
                "a message holds half of a surrogate pair, which stands for no character"
            ) from error
