"""A paged cache in use by made-up requests whose every entry tells what it was computed from.

In place of a target and a head, markers are written: the entry of token n is a number made of the
tokens up to n. Whoever reads must find the markers of its own tokens, wherever they came from: a
shared block, a copied one, its own, or moved drafts.
"""

import random
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from fledge.contracts.sampling import SamplingParams
from fledge.engine.cache import PagedCache
from fledge.engine.prefix import PrefixNode
from fledge.engine.request import Request
from fledge.engine.sequence import Sequence
from fledge.ops.logit_rules import TokenCounts

COUNTS = TokenCounts(8, torch.device("cpu"))
ENTRIES, FEATURES = 0, 1
MAX_TOKENS, NUM_SCRATCH = 64, 5


def make_sequence(token_ids: Many[int], **options: int) -> Sequence:
    request = Request(
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(),
        max_new_tokens=1000,
        eos_token_ids=frozenset(),
    )
    return Sequence(request, COUNTS, **options)


def markers(kind: str, token_ids: Many[int], first: int, stop: int) -> torch.Tensor:
    """What the entries of tokens `first` to `stop` must hold."""
    salt = {"target": 1, "feature": 2, "head": 3}[kind]
    values = [hash((salt, *token_ids[: n + 1])) for n in range(first, stop)]
    return torch.tensor(values, dtype=torch.int64)[:, None]


def places_of(cache: PagedCache) -> Iterator[PrefixNode]:
    """All places of the prefix tree but its root."""
    pending = [cache.known.tree.root]
    while pending:
        node = pending.pop()
        children = [child for some in node._children.values() for child in some.values()]
        yield from children
        pending += children


def check_cache(cache: PagedCache, running: Many[Sequence]) -> None:
    cache.check_integrity(running)
    for node in places_of(cache):
        assert node.blocks or node._children, "an empty place was left in the prefix tree"
        for window, block in node.blocks.items():
            assert cache._pools[window].is_known(block)


class Simulation:
    """Requests come, read, draft, are preempted and leave at random."""

    def __init__(
        self,
        target_windows: Many[int | None],
        head_window: int | None,
        *,
        has_head: bool,
        block_size: int,
        num_tokens: int,
        seed: int,
        max_requests: int = 4,
    ) -> None:
        self.rng = random.Random(seed)
        self.target_windows, self.head_window = tuple(target_windows), head_window
        self.has_head = has_head
        kinds = [*target_windows, *([head_window] if has_head else [])]
        self.cache = PagedCache(
            dict.fromkeys(dict.fromkeys(kinds), -(-num_tokens // block_size)),
            block_size=block_size,
            max_requests=max_requests,
            max_tokens=MAX_TOKENS + NUM_SCRATCH,
            device=torch.device("cpu"),
            head_window=head_window,
            target_windows=target_windows,
        )
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.history: list[list[int]] = [[self.rng.randrange(3) for _ in range(50)]]
        self.num_reused = self.num_refused = 0

    def step(self) -> None:
        rng = self.rng
        (action,) = rng.choices(["start", "read", "draft", "leave"], weights=[4, 8, 8, 1])
        if action == "start" and self.cache.num_free_rows:
            self.start(self.waiting.pop() if self.waiting else make_sequence(self.new_tokens()))
        elif self.running and action == "read":
            self.read(rng.choice(self.running))
        elif self.running and action == "draft":
            self.draft(rng.choice(self.running))
        elif self.running:
            self.leave(rng.choice(self.running))
        check_cache(self.cache, self.running)

    def new_tokens(self) -> list[int]:
        """Often the beginning of what was there before, of any length."""
        rng = self.rng
        stem = rng.choice(self.history)
        stem = stem[: rng.randrange(len(stem) + 1)] if rng.random() < 0.85 else []
        return [*stem[: MAX_TOKENS - 8], *(rng.randrange(3) for _ in range(rng.randrange(1, 5)))]

    def start(self, seq: Sequence) -> None:
        self.cache.start(seq)
        self.running.append(seq)
        self.num_reused += seq.num_reused
        assert seq.kv_len == seq.num_reused < seq.len
        assert 1 <= seq.head_len <= max(1, seq.kv_len)
        self.check_content(seq)

    def leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.history = [*self.history[-6:], list(seq.token_ids)]
        if self.rng.random() < 0.3:
            self.cache.release(seq)
            self.waiting.append(seq)  # preempted: it comes back with all it has said
        else:
            self.cache.release(seq, keep=self.rng.random() < 0.8)
        assert seq.row == -1
        assert not seq.blocks

    def has_reserved(self, seq: Sequence, num_tokens: int) -> bool:
        held = {window: list(blocks) for window, blocks in seq.blocks.items()}
        if self.cache.reserve(seq, num_tokens):
            return True
        self.num_refused += 1
        assert seq.blocks == held, "a refused reservation took something"
        return False

    def read(self, seq: Sequence) -> None:
        """A chunk of unread tokens, or one more token that nobody drafted."""
        goes_on = seq.num_unread == 0 or (seq.num_unread == 1 and self.rng.random() < 0.5)
        if goes_on and seq.len < MAX_TOKENS:
            seq.token_ids.append(self.rng.randrange(3))
        chunk = min(seq.num_unread, self.rng.randrange(1, 40), self.cache.max_chunk)
        if chunk == 0 or not self.has_reserved(seq, seq.kv_len + chunk):
            return
        self.check_content(seq)
        self.write_pass(seq, seq.token_ids, seq.kv_len, seq.kv_len + chunk)
        seq.kv_len += chunk
        self.settle(seq)

    def draft(self, seq: Sequence) -> None:
        """The newest token is the root, drafts behind it; some path of them is accepted."""
        rng = self.rng
        if seq.num_unread != 1 or seq.len + NUM_SCRATCH > MAX_TOKENS:
            return
        if not self.has_reserved(seq, seq.len + NUM_SCRATCH):
            return
        if self.has_head:
            self.catch_up(seq, seq.len)
        self.check_content(seq)
        root, num_accepted = seq.kv_len, rng.randrange(4)
        path = sorted(rng.sample(range(1, NUM_SCRATCH + 1), num_accepted))
        said = [rng.randrange(3) for _ in range(num_accepted)]
        wrong = [*seq.token_ids, 7, 7, 7, 7, 7]
        self.write_pass(seq, wrong, root, root + 1 + NUM_SCRATCH)
        right = [*seq.token_ids, *said]
        for level, node in enumerate(path, start=1):
            # The entry of an accepted draft is that of its token, at the number of its node.
            self.write_pass(seq, right, root + level, root + level + 1, at=root + node)
        levels = torch.arange(4)
        nodes = torch.tensor([0, *path, *range(len(path) + 1, 4)])
        tables, requests = self.cache.tables([seq]), torch.zeros(4, dtype=torch.long)
        self.cache.move(tables, requests[None], (root + nodes)[None], (root + levels)[None])
        seq.token_ids += [*said, rng.randrange(3)]
        seq.kv_len += 1 + num_accepted
        self.settle(seq)

    def settle(self, seq: Sequence) -> None:
        if self.has_head and self.rng.random() < 0.5:
            self.catch_up(seq, min(seq.kv_len, seq.len - 1))
        self.cache.tidy([seq])
        self.cache.free_behind_windows(seq)

    def catch_up(self, seq: Sequence, stop: int) -> None:
        """Make head entries as the drafter does, each of the feature before it."""
        window = self.head_window
        if window is not None and seq.kv_len - window + 1 > seq.head_len:
            seq.head_len = seq.head_first = seq.kv_len - window + 1
        if seq.head_len >= stop:
            return
        memory = self.cache.head_memory
        (features,) = memory.read(FEATURES, self.slots(seq, window, seq.head_len - 1, stop - 1))
        assert torch.equal(features, markers("feature", seq.token_ids, seq.head_len - 1, stop - 1))
        slots = self.slots(seq, window, seq.head_len, stop)
        memory.write(ENTRIES, slots, markers("head", seq.token_ids, seq.head_len, stop))
        seq.head_len = stop

    def write_pass(
        self, seq: Sequence, token_ids: Many[int], first: int, stop: int, at: int | None = None
    ) -> None:
        """Entries of tokens `first` to `stop`, at their numbers or from number `at` on."""
        start = first if at is None else at
        for window in self.target_windows:
            slots = self.slots(seq, window, start, start + stop - first)
            fresh = markers("target", token_ids, first, stop)
            self.cache.target_memory.for_window(window).write(0, slots, fresh)
        if self.has_head:
            slots = self.slots(seq, self.head_window, start, start + stop - first)
            fresh = markers("feature", token_ids, first, stop)
            self.cache.head_memory.write(FEATURES, slots, fresh)

    def slots(self, seq: Sequence, window: int | None, first: int, stop: int) -> torch.Tensor:
        return self.cache.tables([seq]).slots(window, 0, torch.arange(first, stop))

    def check_content(self, seq: Sequence) -> None:
        """All that the request's next token will look at was computed from its own tokens."""
        for window in self.target_windows:
            first = 0 if window is None else max(0, seq.kv_len - window + 1)
            if first < seq.kv_len:
                memory = self.cache.target_memory.for_window(window)
                (seen,) = memory.read(0, self.slots(seq, window, first, seq.kv_len))
                assert torch.equal(seen, markers("target", seq.token_ids, first, seq.kv_len))
        if not self.has_head or not seq.kv_len:
            return
        window, memory = self.head_window, self.cache.head_memory
        first = 0 if window is None else max(0, seq.kv_len - window)
        (seen,) = memory.read(FEATURES, self.slots(seq, window, first, seq.kv_len))
        assert torch.equal(seen, markers("feature", seq.token_ids, first, seq.kv_len))
        first = max(first + 1, seq.head_first)
        if first < seq.head_len:
            (seen,) = memory.read(ENTRIES, self.slots(seq, window, first, seq.head_len))
            assert torch.equal(seen, markers("head", seq.token_ids, first, seq.head_len))
