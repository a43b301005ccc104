"""A controller that chooses from menus for a batch that is filled at once and empties.

Requests come together, a place each, and end after equally many tokens: with drafts at different
times, so that the last ones go on in smaller batches. Drafts of a chain are right by chance, the
same at each depth. Passes take longer with cached tokens, and large ones longer than measured.
While the head sleeps nothing is kept for it, so that a batch that began then is never drafted for,
and of one that an exam began with only few requests are.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fledge.contracts.settings import TreeSettings
from fledge.engine.controller import AdaptiveController
from fledge.engine.draft_gains import NODE_GRID
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load, Menu
from fledge.engine.head_sleep import NUM_EXAMINED
from fledge.engine.pass_times import PassCurve, PassTimes, measured_sizes
from fledge.engine.steady_batch import batch_size
from tests.unit.engine.simulated_machines import H200_8B, MAX_PASS_TOKENS, Array

CHAIN = TreeSettings(depth=5, width=1, budget=5)
RIGHT = 0.777
_PROMPT_TOKENS = 128
_ANSWER_TOKENS = 256
_OTHER_MS = 0.1
_NOISE = 0.01
_MOST_ALONG = 8


@cache
def _chain_gains(right: float) -> Tensor:
    """What `expected_gains` says of a head that knows how often it is right, [D, 1, G]."""
    chances_D = right ** np.arange(1, CHAIN.depth + 1)
    drafted_GD = (np.array(NODE_GRID)[:, None] - np.arange(CHAIN.depth)).clip(0.0, 1.0)
    gains_DG = np.cumsum(drafted_GD * chances_D, axis=1).T
    return torch.from_numpy(gains_DG[:, None]).float()


@dataclass(frozen=True, slots=True)
class CapturedMachine:
    """True times in milliseconds, and what was measured of them at the start."""

    cached_token_ms: float = 25e-6
    measured_token_ms: float = 25e-6
    over_measured: Callable[[float], float] = lambda num_rows: 1.0
    """What passes of so many rows take over what was measured."""

    catching_up_ms: float = 0.0
    catching_up_place_ms: float = 0.0
    """What a cycle takes longer before which the head reads what it missed, at least and for each
    place."""

    keeping: float = 0.0
    """Of a pass without drafts, what it takes to keep features while the head is awake."""

    is_shrinking: bool = True
    """Whether smaller batches are captured, for the last requests of one."""

    def target(self, num_rows: float, context_tokens: float) -> float:
        rows_ms = float(H200_8B(np.array(num_rows))) * self.over_measured(num_rows)
        return rows_ms + self.cached_token_ms * context_tokens

    def head(self, num_rows: Array) -> Array:
        return 0.2 + 0.001 * num_rows

    def cycle(self, num_places: int, plan: DraftPlan, context_tokens: float) -> float:
        drafting_ms = plan.depth * float(self.head(np.array(num_places)))
        return self.target(num_places + plan.nodes, context_tokens) + drafting_ms + _OTHER_MS

    def plain_rate(self, num_requests: int) -> float:
        """Of a whole run without drafts, in tokens per second."""
        lengths = _PROMPT_TOKENS + np.arange(1, _ANSWER_TOKENS)
        plain = DraftPlan(0, 0, 0)
        total_ms = sum(
            self.cycle(num_requests, plan=plain, context_tokens=num_requests * length)
            for length in lengths
        )
        return 1e3 * num_requests * len(lengths) / total_ms

    def controller(self, seed: int) -> AdaptiveController:
        random, sizes = np.random.default_rng(seed), measured_sizes(MAX_PASS_TOKENS)
        tokens = np.array(sizes, dtype=float)

        def curve(true_ms: Array) -> PassCurve:
            wrong = np.exp(0.02 * random.standard_normal(len(sizes)))
            return PassCurve(sizes, 1e-3 * true_ms * wrong)

        context_s = 1e-3 * self.measured_token_ms
        times = PassTimes(curve(H200_8B(tokens)), curve(self.head(tokens)), context_s=context_s)
        return AdaptiveController(CHAIN, times, max_pass_tokens=8192)


CAPTURED_MACHINES = {
    "as measured": CapturedMachine(),
    "cached tokens far cheaper": CapturedMachine(measured_token_ms=200e-6),
    "cached tokens dearer": CapturedMachine(measured_token_ms=10e-6),
    "large passes dearer": CapturedMachine(
        over_measured=lambda rows: float(np.interp(rows, [256, 512, 1024], [1.0, 1.1, 1.4]))
    ),
    "passes beyond 512 far dearer": CapturedMachine(
        over_measured=lambda rows: 1.3 if rows > 512 else 1.0
    ),
}

LEVEL = CapturedMachine(
    over_measured=lambda rows: float(np.interp(rows, [256, 512], [1.0, 1.05])),
    catching_up_ms=12.0,
    catching_up_place_ms=0.1,
    keeping=0.01,
    is_shrinking=False,
)
"""What the 8B shape was on an H200 (benchmarks/2026-11-16-decode-8b-256-h200.json): of 256 requests
one draft each yields about what it takes, less at first and more once much is cached. Taking up
drafting takes as long as four plain cycles, and the last requests stay in the places of all."""


class CapturedRun:
    """Batches that are served one after the other."""

    def __init__(
        self,
        machine: CapturedMachine,
        seed: int = 0,
        right: float = RIGHT,
        spread: float | None = None,
    ) -> None:
        self.machine, self.right, self._spread = machine, right, spread
        self.controller = machine.controller(seed)
        self.nodes: Counter[tuple[int, float]] = Counter()
        """Cycles by places and drafts for each."""

        self.num_hand_overs = 0
        """Cycles with drafts before which the head had to catch up."""

        self.num_told = self.num_plain = 0
        """Tokens of cycles for which features were kept, and of which none were."""

        self._is_told, self._num_begun = np.zeros(0, dtype=bool), 0
        self._num_along = self._num_untold = 0
        """Cycles without drafts since the last one with some, for a while of which the head reads
        along, and tokens of each prompt that it did not read."""

        self._random = np.random.default_rng(seed)
        self._late: deque[CycleReport] = deque()

    def serve(self, num_requests: int, answer_tokens: int = _ANSWER_TOKENS) -> float:
        """One batch from its second tokens to its end; returns tokens per second."""
        is_told = self.controller.meets_requests(has_room=True)
        most_told = NUM_EXAMINED if self.controller.is_exam else num_requests
        self._is_told = (np.arange(num_requests) < most_told) & is_told
        self._num_untold = 0 if self.controller.expects_drafts else _PROMPT_TOKENS
        self._num_along = 0
        self._num_begun, left = num_requests, np.full(num_requests, answer_tokens - 1)
        total_ms = 0.0
        while len(left):
            context_tokens = int((_PROMPT_TOKENS + answer_tokens - left).sum())
            emitted, cycle_ms = self._cycle(left, context_tokens)
            total_ms += cycle_ms
            left = left - emitted
            left, self._is_told = left[left > 0], self._is_told[left > 0]
        return 1e3 * num_requests * (answer_tokens - 1) / total_ms

    def rates(self, sizes: Sequence[int], rounds: int = 3) -> dict[int, list[float]]:
        """Some batches of each size, after a short one."""
        found = {}
        for size in sizes:
            self.serve(size, 64)
            found[size] = [self.serve(size) for _ in range(rounds)]
        return found

    def _cycle(self, left: Array, context_tokens: int) -> tuple[Array, float]:
        count = len(left)
        num_places = batch_size(count if self.machine.is_shrinking else self._num_begun)
        load = self._load(count, num_places, context_tokens, int(left.sum()))
        is_exam, num_told = self.controller.is_exam, len(load.unread)
        are_enough = num_told > 0 and (is_exam or 2 * num_told >= count)
        plan = self.controller.choose(load) if are_enough else PLAIN
        self.nodes[num_places, plan.nodes / num_places] += 1
        place_ND = np.arange(count)[:, None] + count * np.arange(plan.depth)
        has_draft_ND = (place_ND < plan.nodes) & self._is_told[:, None]
        right = self._drawn_right()
        is_right_ND = (self._random.random((count, plan.depth)) < right) & has_draft_ND
        accepted_ND = np.cumprod(is_right_ND, axis=1)
        came_by_ND = np.pad(accepted_ND, [(0, 0), (1, 0)], constant_values=1)[:, : plan.depth]
        emitted = np.minimum(1 + accepted_ND.sum(axis=1), left)
        target_ms, draft_ms = self._passes_ms(plan, num_places, context_tokens)
        num_missed = self._num_missed * num_told if self._is_behind else 0
        if plan.is_plain:
            self._num_along += 1
        else:
            self.num_hand_overs += self._is_behind
            self._num_along = self._num_untold = 0
        self._late.append(
            CycleReport(
                plan=plan,
                load=load,
                target_s=1e-3 * target_ms,
                draft_s=1e-3 * draft_ms,
                other_s=1e-3 * _OTHER_MS,
                emitted=int(emitted.sum()),
                reached_D=tuple((came_by_ND * has_draft_ND).sum(axis=0).tolist()),
                accepted_D=tuple(accepted_ND.sum(axis=0).tolist()),
                num_extended=int(emitted.sum()) + num_missed,
                gains=_chain_gains(right)[: plan.depth] if plan.is_measured else None,
            )
        )
        if len(self._late) > 1:
            self.controller.observe(self._late.popleft())
        return emitted, target_ms + draft_ms + _OTHER_MS

    def _passes_ms(
        self, plan: DraftPlan, num_places: int, context_tokens: int
    ) -> tuple[float, float]:
        """Of the target and of the head."""
        machine = self.machine
        noise = np.exp(_NOISE * self._random.standard_normal(2)).tolist()
        target_ms = noise[0] * machine.target(num_places + plan.nodes, context_tokens)
        step_ms = noise[1] * float(machine.head(np.array(num_places)))
        if not plan.is_plain:
            late_ms = machine.catching_up_ms + machine.catching_up_place_ms * num_places
            return target_ms, plan.depth * step_ms + (late_ms if self._is_behind else 0.0)
        if self.controller.is_asleep:
            return target_ms, 0.0
        is_along = machine.catching_up_ms > 0 and not self._is_behind
        return (1.0 + machine.keeping) * target_ms, step_ms if is_along else 0.0

    def _drawn_right(self) -> float:
        """Of this cycle: texts are easy here and hard there, the more so the smaller the spread."""
        if self._spread is None:
            return self.right
        mean = self._spread * self.right
        return round(float(self._random.beta(mean, self._spread - mean)), 2)

    @property
    def _is_behind(self) -> bool:
        is_left = self._num_untold > 0 or self._num_along > _MOST_ALONG
        return self.machine.catching_up_ms > 0 and is_left

    @property
    def _num_missed(self) -> int:
        return self._num_untold + self._num_along if self._is_behind else 2

    def _load(self, count: int, num_places: int, context_tokens: int, tokens_left: int) -> Load:
        if self.controller.is_asleep:
            self._is_told[:] = False
            self.num_plain += count
            return Load(count, num_places=num_places)
        self.num_told += count
        plans = self.controller.plans(num_places)
        return Load(
            num_requests=count,
            context_tokens=context_tokens,
            tokens_left=None if self.controller.expects_drafts else tokens_left,
            unread=(self._num_missed,) * int(self._is_told.sum()),
            num_places=num_places,
            menu=Menu(plans, frozenset(plans), capture_s=0.05),
        )
