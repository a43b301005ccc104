"""One request while it is served: what was asked, what has been said, where its cache is.

Lengths, for prompt p0 p1 p2 and answer a0 a1 (a1 is the newest token):

    tokens     p0 p1 p2 a0 a1      len 5
    target KV  p0 p1 p2 a0         the newest token is the root of the next verify pass
    features   f0 f1 f2 f3         of the tokens in the target's cache
    head KV       p1 p2 a0 a1      entry j is made of feature j-1 and token j
"""

import time

from torch import Tensor

from fledge.contracts.outputs import Completion, FinishReason, Stats
from fledge.engine.blocks import SlotTable
from fledge.engine.request import Request
from fledge.engine.text import Detokenizer, find_stop, num_safe


class Sequence:
    """The state of a request from the queue to its end."""

    def __init__(self, request: Request, table: SlotTable, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.table = table
        self.output_ids: list[int] = []
        self.cycles = 0
        self.is_dropped = False
        """A pass it took part in failed half-way, so nothing more can be said truthfully."""

        self.finish_reason: FinishReason | None = None
        self.unread_features_NF: Tensor | None = None
        """Features of the last cycle's tokens, which the head has not seen yet."""

        self._detokenizer = detokenizer
        self._num_shown = 0
        self._num_searched = 0
        self._stop_position: int | None = None
        self._started = self._first_token = self._last_token = 0.0

    def start(self) -> None:
        """Its prompt is read in the pass that comes now."""
        self._started = time.perf_counter()

    @property
    def len(self) -> int:
        """Committed tokens, the newest included."""
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    @property
    def newest_token_id(self) -> int:
        return self.output_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def commit(self, token_ids: list[int]) -> int:
        """Take emitted tokens until the answer ends; returns how many were taken."""
        now = time.perf_counter()
        if not self.output_ids:
            self._first_token = now
        self._last_token = now
        for count, token_id in enumerate(token_ids, start=1):
            self._take(token_id)
            if self.is_finished:
                return count
        return len(token_ids)

    def _take(self, token_id: int) -> None:
        request = self.request
        self.output_ids.append(token_id)
        if self._detokenizer is not None:
            self._detokenizer.add(token_id)
        if token_id in request.eos_token_ids or self._reached_stop_text():
            self.finish_reason = "stop"
        elif len(self.output_ids) >= request.max_new_tokens:
            self.finish_reason = "length"
        if self.is_finished and self._detokenizer is not None:
            self._detokenizer.flush()
            self._reached_stop_text()

    def _reached_stop_text(self) -> bool:
        stops = self.request.params.stop
        if self._detokenizer is None or not stops:
            return False
        if self._stop_position is None:
            text = self._detokenizer.text
            self._stop_position = find_stop(text, stops, self._num_searched)
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

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.output_ids),
            prompt_token_ids=self.request.prompt_token_ids,
            finish_reason=self.finish_reason,
            stats=Stats(
                num_tokens=len(self.output_ids),
                cycles=self.cycles,
                prefill_s=self._first_token - self._started,
                decode_s=self._last_token - self._first_token,
            ),
        )
