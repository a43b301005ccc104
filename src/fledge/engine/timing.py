"""Times real passes of a target and a head on scratch memory, for the controller."""

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from fledge.contracts.settings import EngineSettings
from fledge.engine.graphs import Graphs
from fledge.engine.pass_times import PassTimes
from fledge.engine.pass_times_cache import load_or_measure, machine_key
from fledge.models.attention import attend_packed
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.ops.attention import AttentionSpec
from fledge.ops.kv import KVPool
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.top_logprobs import top_logprobs
from fledge.store.cache import default_cache_dir

_BLOCK_SIZE = 16
_CONTEXT_REQUESTS = 16
"""Requests that cached tokens are spread over: one alone waits for its longest row, many together
for memory, and what a cached token costs many is what counts."""
_MOST_TOKENS = {"cpu": 512, "cuda": 1024}
"""Passes are timed up to this size; beyond it times grow with the tokens. A GPU that serves many
requests verifies more than a CPU ever would."""


def measure_pass_times(
    target: Target, head: Eagle3Head, settings: EngineSettings, *, name: str
) -> PassTimes:
    """How long passes take on this machine; measured once and kept under `name`."""
    timer = _PassTimer(target, head)
    shape = f"{head.config}"
    return load_or_measure(
        f"{machine_key(target.device)} | {name} | {target.dtype} | {shape} | captured, varied"
        f" | spread | to {_MOST_TOKENS[target.device.type]}",
        default_cache_dir(),
        max_tokens=min(_MOST_TOKENS[target.device.type], settings.max_pass_tokens),
        measure_target=timer.target_s,
        measure_head=timer.head_s,
        measure_context=timer.context_s,
    )


class _PassTimer:
    """Passes over made-up tokens; what they say does not matter."""

    def __init__(self, target: Target, head: Eagle3Head) -> None:
        self._target, self._head = target, head
        self._taps = head.config.resolve_taps(target.num_layers)
        self._graphs = Graphs(target.device)
        self._passes: dict[tuple[str, int], Callable[[], object]] = {}

    def target_s(self, num_tokens: int) -> float:
        """A pass of so many tokens, features and logits included."""
        return self._timed("target", num_tokens, self._target_pass)

    def context_s(self, num_context: int) -> float:
        """A pass of one token of each of some requests, which see so many together."""
        return self._timed("context", num_context, self._context_pass)

    def head_s(self, num_tokens: int) -> float:
        """A head pass of so many tokens, logits and the choice of children included."""
        return self._timed("head", num_tokens, self._head_pass)

    def _target_pass(self, num_tokens: int) -> Callable[[], object]:
        packed, memory = self._chain(num_tokens), KVPool(num_tokens)
        return lambda: self._target.forward(packed, memory, taps=self._taps)

    def _context_pass(self, num_context: int) -> Callable[[], object]:
        each = num_context // _CONTEXT_REQUESTS
        num_blocks = each // _BLOCK_SIZE + 1
        memory = KVPool(_CONTEXT_REQUESTS * num_blocks * _BLOCK_SIZE)
        self._target.forward(self._chain(1), memory)
        # Copies of one token stand for the others: reading so many would take a while.
        slots = torch.arange(memory.num_slots, device=self._target.device)
        memory.move(torch.zeros_like(slots), slots)
        packed = self._decoding(_CONTEXT_REQUESTS, each, num_blocks)
        return lambda: self._target.forward(packed, memory, taps=self._taps)

    def _head_pass(self, num_tokens: int) -> Callable[[], object]:
        head, packed, memory = (
            self._head,
            self._chain(num_tokens),
            KVPool(num_tokens),
        )
        spec = AttentionSpec(scale=head.config.head_dim**-0.5, window=head.config.sliding_window)
        hidden = self._target.embedding.weight.new_ones(num_tokens, head.config.hidden_size)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_packed(packed, memory, 0, query, keys, values, spec)

        @torch.no_grad()
        def run() -> None:
            embeds = head.embed(packed.token_ids_T, self._target.embedding.weight)
            output = head(embeds, hidden, packed.positions_T, attend)
            top_logprobs(head.logits(output.normed_TD), 1)

        return run

    def _timed(self, kind: str, size: int, make: Callable[[int], Callable[[], object]]) -> float:
        """Seconds of one pass, as the engine runs it: captured, where there is a device for it."""
        key = (kind, size)
        if key not in self._passes:
            self._passes[key] = make(size)
            if self._target.device.type == "cuda":
                for _ in range(2):
                    self._graphs.run(key, self._passes[key])
        self._wait()
        started = time.perf_counter()
        self._graphs.run(key, self._passes[key])
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)

    def _chain(self, num_tokens: int) -> TreePass:
        """One request whose tokens lie at the slots of their numbers, whatever a layer's window is.

        It may be longer than the target's context: positions then end with the last there is.
        """
        device = self._target.device
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        return self._pass(
            torch.tensor([num_tokens], device=device),
            torch.tensor([0], device=device),
            torch.arange(num_blocks, device=device)[None],
            num_rows=num_tokens,
            num_short=0,
        )

    def _decoding(self, num_requests: int, num_context: int, num_blocks: int) -> TreePass:
        """Requests with a token each behind so many, in blocks of their own."""
        device = self._target.device
        return self._pass(
            torch.ones(num_requests, dtype=torch.long, device=device),
            torch.full((num_requests,), num_context, device=device),
            torch.arange(num_requests * num_blocks, device=device).view(num_requests, num_blocks),
            num_rows=num_requests,
            num_short=num_requests,
        )

    def _pass(
        self, chain_B: Tensor, context_B: Tensor, table_BP: Tensor, *, num_rows: int, num_short: int
    ) -> TreePass:
        tokens = torch.arange(num_rows, device=self._target.device)
        return make_tree_pass(
            # Different ones: a router sends copies of a token to the same few experts.
            chain_tokens_C=tokens * 7919 % self._target.vocab_size,
            chain_B=chain_B,
            context_B=context_B,
            trees=None,
            num_rows=num_rows,
            tables=BlockTables(_BLOCK_SIZE, defaultdict(lambda: table_BP)),
            num_short=num_short,
            last_position=self._target.context_len - 1,
        )
