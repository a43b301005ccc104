"""What runs in the next pass: who decodes, who reads how many tokens, who has to wait.

Requests that decode come first; what the pass may hold beyond them goes to reading, so that a long
prompt is read in chunks beside the streams it would otherwise stall. When memory runs out the least
important request (lowest priority, latest arrival) gives up its own and reads its tokens again
later; what it had said stays said.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.fair_queue import FairQueue
from fledge.engine.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """The requests of one pass."""

    drafting: list[Sequence] = field(default_factory=list)
    """They decode, and have room for drafts."""

    plain: list[Sequence] = field(default_factory=list)
    """They decode without drafts."""

    finishing: list[tuple[Sequence, int]] = field(default_factory=list)
    """They read their last unread tokens, so many, and say the next one."""

    reading: list[tuple[Sequence, int]] = field(default_factory=list)
    """They read a chunk and have more to read."""

    @property
    def num_decoding(self) -> int:
        return len(self.drafting) + len(self.plain)

    @property
    def num_read_tokens(self) -> int:
        return sum(chunk for _, chunk in [*self.finishing, *self.reading])

    def holds(self, seq: Sequence) -> bool:
        """Whether the request is part of this pass."""
        read = (one for one, _ in [*self.finishing, *self.reading])
        return any(seq is one for one in [*self.drafting, *self.plain, *read])

    def __bool__(self) -> bool:
        return bool(self.drafting or self.plain or self.finishing or self.reading)


def importance(seq: Sequence) -> tuple[int, int]:
    return seq.priority, -seq.arrival


class Scheduler:
    """Queue, running requests and the memory they share."""

    def __init__(self, cache: PagedCache, settings: EngineSettings) -> None:
        self._cache = cache
        self._max_tokens = settings.max_pass_tokens
        self._queue = FairQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Requests that have not started, or have to start again."""
        return self._queue

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self._queue))

    @property
    def could_admit(self) -> bool:
        """Whether a waiting request could start now, or take the place of one that runs."""
        seq = self._queue.peek()
        if seq is None:
            return False
        if self._cache.num_free_rows and (self._has_room(seq) or self._could_share(seq)):
            return True
        return any(one.priority < seq.priority for one in self.running)

    def add(self, seq: Sequence) -> None:
        self._queue.push(seq)

    def cancel(self, seq: Sequence) -> None:
        """Forget a request wherever it is; one that has ended is not here any more."""
        if seq.row >= 0:
            self.finish(seq)
        elif seq.is_waiting:
            seq.is_waiting = False
            self._queue.remove(seq)

    def finish(self, seq: Sequence, *, keep: bool = True) -> None:
        """A running request has ended; `keep` leaves its cache entries for others."""
        self._cache.release(seq, keep=keep)
        self.running.remove(seq)

    def drop_running(self) -> list[Sequence]:
        """A cycle was cut short: whoever held memory has none any more."""
        dropped, self.running = self.running, []
        # One that was being admitted is still in the queue, and waits on.
        for seq in [*dropped, *(seq for seq in self._queue if seq.row >= 0)]:
            seq.leave_cache()
        return dropped

    def bill(self, seq: Sequence, num_tokens: int) -> None:
        """Charge a client for tokens read or said, each of them once."""
        if num_tokens > seq.num_billed:
            self._queue.charge(seq.client, num_tokens - seq.num_billed)
            seq.num_billed = num_tokens

    def bill_all(self, sequences: Many[Sequence]) -> None:
        """Charge clients for all that these have read and said, each token once."""
        owed: dict[str, int] = {}
        for seq in sequences:
            num_tokens = len(seq.token_ids)
            if num_tokens > seq.num_billed:
                owed[seq.client] = owed.get(seq.client, 0) + num_tokens - seq.num_billed
                seq.num_billed = num_tokens
        for client, num_tokens in owed.items():
            self._queue.charge(client, num_tokens)

    def plan(self, *, num_scratch: int, num_drafts: int) -> StepPlan:
        """Choose the next pass and reserve its memory.

        `num_scratch` is what a request needs behind its newest token to be drafted for, 0 when
        nothing is; `num_drafts` is how many drafts the pass is likely to hold.
        """
        self._make_way()
        plan = StepPlan()
        self.running.sort(key=importance, reverse=True)
        decoding = [seq for seq in self.running if seq.is_decoding]
        plan.plain = [seq for seq in decoding if self._keep_room(seq)]
        left = max(1, self._max_tokens - plan.num_decoding - num_drafts)
        left = self._continue_reading(plan, left)
        if num_scratch:
            self._grant_drafts(plan, num_scratch)
        self._admit(plan, left)
        return plan

    def plan_beside(self) -> StepPlan:
        """A pass that only reads, while the others run ahead and keep all that they hold."""
        self._make_way()
        self.running.sort(key=importance, reverse=True)
        plan = StepPlan(plain=[seq for seq in self.running if not seq.is_reading])
        left = self._continue_reading(plan, self._max_tokens, takes_drafts=False)
        self._admit(plan, left)
        plan.plain = []
        return plan

    @property
    def num_startable(self) -> int:
        """Waiting requests that there are rows for."""
        return min(self.num_waiting, self._cache.num_free_rows)

    def _make_way(self) -> None:
        """A waiting request takes the row and the memory of running ones of lower priority."""
        seq = self._queue.peek()
        while (
            seq is not None
            and self.running
            and not (self._cache.num_free_rows and self._has_room(seq))
        ):
            victim = min(self.running, key=importance)
            if victim.priority >= seq.priority:
                return
            self.preempt(victim)

    def _has_room(self, seq: Sequence) -> bool:
        """Whether a waiting request can start, with some memory left for those that run."""
        num_running = len(self.running)
        return not num_running or self._cache.has_room(seq, seq.len + 1, num_running)

    def _could_share(self, seq: Sequence) -> bool:
        """Whether a waiting request has room thanks to blocks that those that run hold anyway."""
        num_shared = self._cache.known.num_shared(seq)
        num_needed = seq.len + 1 - num_shared
        return num_shared > 0 and self._cache.has_room(seq, num_needed, len(self.running))

    def _keep_room(self, seq: Sequence) -> bool:
        """Room for a decoding request's newest token, taken from less important ones if need be."""
        # One that was preempted for a more important request has no row any more.
        while seq.row >= 0 and not self._cache.reserve(seq, seq.len):
            if not self._take_back_drafts():
                self.preempt(min(self.running, key=importance))
        return seq.row >= 0

    def _take_back_drafts(self) -> bool:
        """Free the blocks that drafts had in earlier passes; whether there were any."""
        decoding = [seq for seq in self.running if seq.is_decoding]
        return sum(self._cache.trim(seq, seq.len) for seq in decoding) > 0

    def _grant_drafts(self, plan: StepPlan, num_scratch: int) -> None:
        decoding, plan.plain = plan.plain, []
        for seq in decoding:
            can_draft = seq.may_have_drafts and self._cache.reserve(seq, seq.len + num_scratch)
            (plan.drafting if can_draft else plan.plain).append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a request's memory; it waits at the front and reads its tokens again."""
        self._cache.release(seq)
        self.running.remove(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._queue.push(seq, front=True)
        seq.is_waiting = True

    def _continue_reading(self, plan: StepPlan, left: int, *, takes_drafts: bool = True) -> int:
        """Go on with prompts that were begun; waiting ones of higher priority come before them."""
        for seq in [seq for seq in self.running if seq.is_reading]:
            left = self._admit(plan, left, above=seq.priority)
            # A more important one may have taken its row in the meantime.
            if left <= 0 or seq.row < 0:
                continue
            chunk = min(seq.num_unread, left, self._cache.max_chunk)
            if not self._find_room(plan, seq, chunk, takes_drafts=takes_drafts):
                chunk = min(chunk, self._cache.most_readable(seq))
            if self._cache.reserve(seq, seq.kv_len + chunk):
                self._read(plan, seq, chunk)
                left -= chunk
        return left

    def _find_room(self, plan: StepPlan, seq: Sequence, chunk: int, *, takes_drafts: bool) -> bool:
        """Room for a part of a prompt, taken from less important requests that are not served."""
        while not self._cache.reserve(seq, seq.kv_len + chunk):
            if takes_drafts and self._take_back_drafts():
                continue
            victim = min(self.running, key=importance)
            if victim is seq or plan.holds(victim):
                return False  # it waits for others to end; alone it always fits
            self.preempt(victim)
        return True

    def _read(self, plan: StepPlan, seq: Sequence, chunk: int) -> None:
        is_last = chunk == seq.num_unread
        (plan.finishing if is_last else plan.reading).append((seq, chunk))
        self.bill(seq, seq.kv_len + chunk)

    def _admit(self, plan: StepPlan, left: int, above: int | None = None) -> int:
        """Start waiting requests while rows, memory and the pass have room for them."""
        while left > 0 and self._cache.num_free_rows and (seq := self._queue.peek()) is not None:
            if above is not None and seq.priority <= above:
                break
            self._cache.start(seq)
            chunk = min(seq.num_unread, left, self._cache.most_readable(seq))
            if (
                not self._has_room(seq)
                or self._is_being_read(seq)
                or not self._cache.reserve(seq, seq.kv_len + chunk)
            ):
                self._cache.release(seq)
                break
            self._queue.pop()
            seq.is_waiting = False
            seq.num_billed = max(seq.num_billed, seq.kv_len)  # what was kept costs nothing
            seq.start()
            self.running.append(seq)
            self._read(plan, seq, chunk)
            left -= chunk
        return left

    def _is_being_read(self, seq: Sequence) -> bool:
        """Another request is reading the same beginning: waiting a pass saves reading it twice."""
        stop = seq.kv_len + self._cache.block_size
        if seq.len <= stop or not self._cache.shares_prefixes:
            return False
        return any(
            one.kv_len < stop <= len(one.token_ids) - 1
            and one.is_reading
            and one.token_ids[:stop] == seq.token_ids[:stop]
            for one in self.running
        )
