"""A controller at work on a machine, a head and a load made of numbers.

A run lets a controller choose cycle by cycle and adds up time and tokens. Tokens are counted in
expectation, which takes luck out of the comparison, while the controller is told only what was
drawn, two cycles late, with noisy times.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from fledge.engine.draft_plan import Controller, CycleReport, DraftPlan, Load
from tests.unit.engine.simulated_machines import Array, Machine
from tests.unit.engine.simulated_trees import TreeBank, Trees

_REPORT_DELAY = 2
_ANSWER_TOKENS = 256
_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Best:
    """The best fixed setting and its rate in tokens per second."""

    plan: DraftPlan
    rate: float
    plain_rate: float


def best_fixed(machine: Machine, bank: TreeBank) -> Best:
    """Search all depths and widths, and numbers of nodes in steps of a tenth."""
    count = bank.num_requests
    plain_ms = float(machine.target(np.array(float(count)))) + machine.other_ms
    plain_rate = 1e3 * count / plain_ms
    best = Best(DraftPlan(0, 0, 0), plain_rate, plain_rate)
    for depth in range(1, bank.tree.depth + 1):
        for width in bank.widths:
            gains = bank.mean_expected(depth, width)
            steps = np.unique(np.geomspace(1, bank.max_nodes, 80).round().astype(int))
            nodes = steps[steps < len(gains)]
            drafting = (depth - 1) * machine.head(np.array(float(count * width)))
            read = (count + gains[nodes]) * (1 + _PROMPT_TOKENS / _ANSWER_TOKENS)
            drafting = drafting + machine.head(read)
            total_ms = machine.target(count + nodes.astype(float)) + drafting + machine.other_ms
            rates = 1e3 * (count + gains[nodes]) / total_ms
            place = int(rates.argmax())
            if rates[place] > best.rate:
                plan = DraftPlan(depth, width, int(nodes[place]))
                best = Best(plan, float(rates[place]), plain_rate)
    return best


@dataclass(slots=True)
class Run:
    """A controller at work."""

    machine: Machine
    controller: Controller
    noise: float = 0.03
    seed: int = 0
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plans: list[DraftPlan] = field(default_factory=list)
    _late: deque[CycleReport] = field(default_factory=deque)
    _unread: Array = field(default_factory=lambda: np.zeros(0))

    def cycles(self, bank: Trees, num_cycles: int) -> None:
        """Decode with the trees of a bank, batches in random order."""
        random = np.random.default_rng(self.seed + len(self.tokens))
        rounds = -(-num_cycles // bank.num_batches)
        order = np.concatenate([random.permutation(bank.num_batches) for _ in range(rounds)])
        for batch in order[:num_cycles]:
            self._cycle(bank, int(batch), random)

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        """Tokens per second between two cycles."""
        return sum(self.tokens[start:stop]) / sum(self.seconds[start:stop])

    def _cycle(self, bank: Trees, batch: int, random: np.random.Generator) -> None:
        count, machine = bank.num_requests, self.machine
        if len(self._unread) != count:
            self._unread = np.full(count, float(_PROMPT_TOKENS))
        load = Load(num_requests=count, unread=tuple(self._unread.astype(int).tolist()))
        plan = self.controller.choose(load)
        outcome = bank.outcome(plan, batch)
        drafted = np.argsort(self._unread, kind="stable")[: outcome.num_drafted]
        num_extended = float(self._unread[drafted].sum())
        self._unread[drafted] = 0.0
        emitted = count + sum(outcome.accepted_D)
        self._unread += emitted / count
        self._unread[random.random(count) < emitted / count / _ANSWER_TOKENS] = _PROMPT_TOKENS
        target_ms = float(machine.target(np.array(float(count + plan.nodes))))
        draft_ms = 0.0
        if outcome.num_drafted:
            step_tokens = np.array(float(outcome.num_drafted * plan.width))
            steps_ms = (plan.depth - 1) * machine.head(step_tokens)
            draft_ms = float(machine.head(np.array(num_extended)) + steps_ms)
        self.tokens.append(count + outcome.expected)
        self.seconds.append(1e-3 * (target_ms + draft_ms + machine.other_ms))
        self.plans.append(plan)
        stutter = 5.0 if random.random() < 0.01 else 1.0
        factor = 1e-3 * stutter * np.exp(self.noise * random.standard_normal(2))
        self._late.append(
            CycleReport(
                plan=plan,
                load=load,
                target_s=target_ms * factor[0],
                draft_s=draft_ms * factor[1],
                other_s=1e-3 * machine.other_ms,
                emitted=emitted,
                reached_D=outcome.reached_D,
                accepted_D=outcome.accepted_D,
                num_extended=round(num_extended),
                gains=outcome.gains,
            )
        )
        if len(self._late) > _REPORT_DELAY:
            self.controller.observe(self._late.popleft())
