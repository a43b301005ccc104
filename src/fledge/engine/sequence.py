"""One request while it is served: what was asked, what has been said, where its cache is.

Lengths, for prompt p0 p1 p2 and answer a0 a1 (a1 is the newest token):

    number     0  1  2  3  4
    tokens     p0 p1 p2 a0 a1      len 5
    target KV  p0 p1 p2 a0         kv_len 4: the newest token is the root of the next verify pass
    features   f0 f1 f2 f3         of the tokens in the target's cache
    head KV       p1 p2 a0 a1      entry j is made of feature j-1 and token j; head_len 5 when the
                                   head has caught up, less while nothing was drafted

Before the prompt is read, and again after the request had to give up its memory, `kv_len` is
smaller: the tokens between it and `len` are read in chunks, and the last of them chooses the next.
"""

import time

from fledge.contracts.errors import FledgeError
from fledge.contracts.outputs import Completion, FinishReason, Stats, TokenLogprobs
from fledge.engine.draft_tally import DraftTally
from fledge.engine.grammar import GrammarState
from fledge.engine.prefix import PrefixNode
from fledge.engine.request import Request
from fledge.engine.text import Detokenizer, find_stop, num_safe
from fledge.engine.token_history import Copy, TokenHistory
from fledge.ops.logit_rules import RequestRules, TokenCounts


class Sequence:
    """The state of a request from the queue to its end."""

    row: int
    """Its row in the block tables, while it runs."""

    def __init__(
        self,
        request: Request,
        counts: TokenCounts,
        detokenizer: Detokenizer | None = None,
        *,
        grammar: GrammarState | None = None,
        priority: int = 0,
        client: str = "",
        arrival: int = 0,
    ) -> None:
        self.request, self.grammar = request, grammar
        self.priority, self.client, self.arrival = priority, client, arrival
        self.token_ids = list(request.prompt_token_ids)
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.draft_depths: list[int] = []
        self.text_ends: list[int] = []
        """Of each token, how long the text was with it: kept, as the depths are, when asked for."""

        self.rules = RequestRules(
            request.params,
            request.prompt_token_ids,
            self.output_ids,
            request.eos_token_ids,
            counts,
        )
        self.error: FledgeError | None = None
        """Why it ended without an answer; others in the same pass went on."""

        self.finish_reason: FinishReason | None = None
        self.is_waiting = True
        self.is_suspect = False
        """Its last drafts had no numbers for logits: the next cycle does without."""

        self.cycles = self.num_preemptions = self.num_prompt_reused = 0
        self.num_billed = 0
        """Tokens, from the first on, that its client was charged for."""

        self.drafts = DraftTally()
        self.copies_offered = self.copies_accepted = 0
        self._history: TokenHistory | None = None
        self.leave_cache()
        self._detokenizer = detokenizer
        if detokenizer is not None:
            detokenizer.follow(self.output_ids)
        params = request.params
        self._ends_simply = not params.stop and grammar is None and not params.draft_depths
        """Whether its answer ends at a token or a length, whatever the text says."""

        self._num_shown = self._num_searched = self._num_unstoppable = 0
        self._stop_position: int | None = None
        self._arrived = time.perf_counter()
        self._started = self._first_token = self._last_token = 0.0
        self._longest_gap = 0.0

    def leave_cache(self) -> None:
        """It holds no memory (any more)."""
        self.row = -1
        self.rules.release()
        self.kv_len = 0
        self.head_len = self.head_first = 1
        self.lacks_features = False
        """Whether tokens of it were read while the head slept: it can not be drafted for."""

        self.blocks: dict[int | None, list[int]] = {}
        self.nodes: list[PrefixNode] = []
        """Places of its whole blocks in the prefix tree."""

        self.num_freed: dict[int | None, int] = {}
        self.num_noted = self.num_reused = 0

    def start(self) -> None:
        """It runs from now on; the time before was spent in the queue."""
        if not self._started:
            self._started = time.perf_counter()
            self.num_prompt_reused = self.num_reused

    @property
    def len(self) -> int:
        """Committed tokens, the newest included."""
        return len(self.token_ids)

    @property
    def num_unread(self) -> int:
        """Committed tokens that the target has not read yet, the newest included."""
        return len(self.token_ids) - self.kv_len

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is unread: drafts may hang below it."""
        return len(self.token_ids) - self.kv_len == 1 and bool(self.output_ids)

    @property
    def is_reading(self) -> bool:
        """There are tokens to read before the next one is said, and nobody reads the last yet."""
        num_unread = len(self.token_ids) - self.kv_len
        return num_unread > 1 or (num_unread == 1 and not self.output_ids)

    @property
    def newest_token_id(self) -> int:
        return self.token_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        """Finished, or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def may_have_drafts(self) -> bool:
        return self.request.params.speculate and not (self.is_suspect or self.lacks_features)

    def find_copy(self, count: int) -> Copy | None:
        """What followed where its newest tokens stood before, as if there were always more."""
        if self._history is None:
            self._history = TokenHistory()
        return self._history.find(self.token_ids, count)

    def record_drafts(
        self, num_offered: int, num_accepted: int, *, is_copied: bool = False
    ) -> None:
        """A cycle offered drafts down to one depth, and the target accepted down to another."""
        if is_copied:
            self.copies_offered += num_offered
            self.copies_accepted += num_accepted
        self.drafts.count(num_offered, num_accepted)

    def commit(
        self,
        token_ids: list[int],
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        *,
        now: float,
    ) -> int:
        """Take emitted tokens until the answer ends; returns how many were taken."""
        output_ids = self.output_ids
        if output_ids:
            self.cycles += 1
            gap = now - self._last_token
            if gap > self._longest_gap:
                self._longest_gap = gap
        else:
            self._first_token = now
        self._last_token = now
        request = self.request
        if self._ends_simply and logprobs is None:
            # What most cycles come to, many thousand times a second.
            room, ends = request.max_new_tokens - len(output_ids), request.eos_token_ids
            if len(token_ids) > room:
                token_ids = token_ids[:room]
            if not ends.isdisjoint(token_ids):
                first = next(i for i, token_id in enumerate(token_ids) if token_id in ends)
                token_ids = token_ids[: first + 1]
                reason: FinishReason | None = "stop"
            else:
                reason = "length" if len(token_ids) == room else None
            output_ids += token_ids
            self.token_ids += token_ids
            if reason is not None:
                self._end(reason)
            return len(token_ids)
        count = 0
        while count < len(token_ids) and not self.is_finished:
            self._take(token_ids[count])
            count += 1
        if logprobs is not None:
            self.logprobs += logprobs[:count]
        if self.request.params.draft_depths:
            # Drafts were accepted level by level; what follows the last one is the target's own.
            self.draft_depths += [*range(1, len(token_ids)), 0][:count]
        return count

    def _take(self, token_id: int) -> None:
        request = self.request
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)
        # Sampling keeps end tokens away before `min_tokens`; stop texts wait for it too.
        may_stop = len(self.output_ids) >= request.params.min_tokens
        is_over = token_id in request.eos_token_ids or self._reached_stop_text(may_stop)
        if self.grammar is not None and not is_over:
            is_over = self.grammar.take(token_id)
        if is_over or len(self.output_ids) >= request.max_new_tokens:
            self._end("stop" if is_over else "length")
            self._reached_stop_text(may_stop)
        if request.params.draft_depths:
            self.text_ends.append(len(self.text))

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._detokenizer is not None:
            self._detokenizer.flush()

    def _reached_stop_text(self, may_stop: bool) -> bool:
        stops = self.request.params.stop
        if self._detokenizer is None or not stops:
            return False
        if self._stop_position is None:
            text = self._detokenizer.text
            if may_stop:
                self._stop_position = find_stop(
                    text, stops, self._num_searched, self._num_unstoppable
                )
            else:
                self._num_unstoppable = len(text)
            # The next search starts early enough to see a stop text that is half there now.
            self._num_searched = max(0, len(text) - max(map(len, stops)) + 1)
        return self._stop_position is not None

    @property
    def text(self) -> str:
        """The answer so far, cut where a stop text begins."""
        if self._detokenizer is None:
            return ""
        return self._detokenizer.text[: self._stop_position]

    def take_new_text(self) -> str:
        """Text that became final since the last call."""
        text = self.text
        if not self.is_finished:
            text = text[: num_safe(text, self.request.params.stop)]
        fresh, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        return fresh

    def token_texts(self, first: int, text: str) -> list[str]:
        """What `take_new_text` gave, shared out to the tokens from this one on.

        A token that ends inside a character has no text; the one that completes it has all of it.
        """
        offset = self._num_shown - len(text)
        start, texts = 0, []
        for end in self.text_ends[first:]:
            texts.append(text[start : max(start, end - offset)])
            start += len(texts[-1])
        return texts

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        params = self.request.params
        return Completion(
            text=self.text,
            token_ids=tuple(self.output_ids),
            prompt_token_ids=self.request.prompt_token_ids,
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs) if params.logprobs is not None else None,
            draft_depths=tuple(self.draft_depths) if params.draft_depths else None,
            stats=Stats(
                num_tokens=len(self.output_ids),
                cycles=self.cycles,
                queue_s=self._started - self._arrived,
                prefill_s=self._first_token - self._started,
                decode_s=self._last_token - self._first_token,
                longest_gap_s=self._longest_gap,
                num_prompt_reused=self.num_prompt_reused,
                num_preemptions=self.num_preemptions,
                offered_at_depth=self.drafts.offered_at_depth,
                accepted_at_depth=self.drafts.accepted_at_depth,
                num_copies_offered=self.copies_offered,
                num_copies_accepted=self.copies_accepted,
            ),
        )
