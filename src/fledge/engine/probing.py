"""Cycles that are run for what they teach, and what they may cost.

A small share of all time is saved up and pays for probes. A probe costs its time less what its
tokens would have taken otherwise, so probes that turn out well pay for more of them, and the
controller finds out quickly when drafting begins to pay.

While decoding plainly the head falls behind, and reading what it missed is the dearest part of a
probe. A probe then drafts for a few requests only, those that are least behind, as many as there is
time for.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from fledge.contracts.settings import TreeSettings
from fledge.engine.acceptance_model import AcceptanceModel
from fledge.engine.cycle_costs import CycleCosts
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.outlook import Outlook, Planner

SHARE = 0.007
"""Of all time, what probes may cost on average where a very good head would gain much."""
_LEAST_HOPE = 0.1
"""Of that share, what they may cost where no head would gain: what cycles take may be misjudged."""
_MIN_INTERVAL = 6
"""Cycles between probes."""
_MIN_INTERVAL_CAPTURED = 24
"""Between captured ones that draft, where there are few other plans and most of them are seen
anyway, or that have many requests, of which one cycle says much."""
_LONGEST_INTERVAL = 1024
_PROBES_PER_DOUBLING = 2
"""While captured cycles decode plainly, probes become rarer: between them the head reads along,
which costs some percent, until it is left behind."""
_FEW_REQUESTS = 4
"""Up to so many, new ones are most of what is decoded."""
_NEW_TEXT_CYCLES = 128
"""Between two times that new ones make probes come early: requests may be short."""
_SURELY_PAID = 2
"""One probe that pays may be chance."""
_HOPEFUL = 0.93
"""Of what the plan in use yields, what a larger captured one is expected to if it is probed."""
_LONG_WAIT = 64
"""Cycles after which a report is given up, and after which a probe may be poor."""
_MOST_SAVED = 0.05
"""Largest saving, as a share of the time since the start; at least one cycle."""
_FIRST_CYCLES = 1.0
"""Saved at the start, in plain cycles: the first probes tell more than any later ones."""
_FIRST_TREES = 8
"""Trees to be seen before drafting is judged: a few cycles if there are few requests."""
_FOLLOW_UPS = 6
_FOLLOW_UP_CYCLES = 2.0
"""Cycles' worth of time that follow-ups may borrow."""
_FEWEST = 1 / 16
"""Of the requests, how many a probe should ask for."""
_WELL_KNOWN = 4.0
"""Real passes of the plain size before plain decoding is taken as known."""
_SURELY_BETTER = 2.0
"""Drafting that is expected to gain so much is rarely compared with plain decoding."""
_SURELY_BETTER_CAPTURED = 1.25
"""The same for captured cycles, whose times are known before the first of them."""
_PROBES_PER_DOUBT = 16


class Prober:
    """Decides when to probe and with what plan."""

    def __init__(
        self, tree: TreeSettings, model: AcceptanceModel, costs: CycleCosts, planner: Planner
    ) -> None:
        self._tree = tree
        self._model = model
        self._costs = costs
        self._planner = planner
        self._saved_s, self._hope = 0.0, 1.0
        self._has_begun = False
        self._cycle_s = 0.0
        self._num_cycles = 0
        self._last_probe = -_MIN_INTERVAL
        self._is_out = False
        self._hurry = 0
        self._num_fruitless: defaultdict[int, int] = defaultdict(int)
        """Probes since the last cycle that was meant to draft, or a probe paid, for each size of
        batch."""

        self._num_paid = 0
        """Probes of captured plans in a row, up to the newest, that yielded more than the plan in
        use."""

        self._are_new, self._last_new = False, 0
        """Whether requests have come since the last look, and the cycle in which that last
        counted."""

        self._num_turns = 0
        """Times that there was time for a probe, whether one was worth it or not."""

        self.num_probes = 0

    def begin_anew(self) -> None:
        """The head may have changed: probes need not be rare."""
        self._is_out = False
        self._num_fruitless.clear()

    def meet_requests(self) -> None:
        """Requests are about to start."""
        self._are_new = True

    def tick(self) -> None:
        """A cycle is about to start."""
        self._num_cycles += 1

    def save(self, cycle_s: float) -> None:
        """A cycle has ended."""
        self._cycle_s += max(0.05, 1 / (self._num_cycles + 1)) * (cycle_s - self._cycle_s)
        most_s = max(1.0, _MOST_SAVED * self._num_cycles) * self._cycle_s
        self._saved_s = min(self._saved_s + self._hope * SHARE * cycle_s, most_s)

    def pay(self, report: CycleReport, usual_rate: float) -> None:
        """A probe has ended; otherwise its tokens would have come at the usual rate."""
        self._is_out = False
        # A stutter of the machine is not the probe's to pay.
        likely_s = min(report.cycle_s, 2.0 * self._planner.cycle_s(report.plan, report.load))
        self._saved_s -= likely_s - report.emitted / usual_rate
        if report.load.menu is not None and not report.plan.is_plain:
            steady_s = self._costs.drafting_s(report.load, report.plan, report.num_drafted)
            self._num_paid = self._num_paid + 1 if report.emitted > usual_rate * steady_s else 0
            if self._num_paid:
                # The text may have become easy to draft for.
                self._num_fruitless[report.load.num_places] //= 2
            if self._num_paid >= _SURELY_PAID:
                self.follow_up()

    def follow_up(self) -> None:
        """A probe had an unusual outcome: a few more should follow at once."""
        if self._hurry == 0:
            self._hurry = _FOLLOW_UPS

    def propose(self, plan: DraftPlan, outlook: Outlook, load: Load) -> DraftPlan | None:
        """A cycle that would tell something the plan in use cannot, if there is time for one."""
        if not self._has_begun:
            self._has_begun = True
            self._saved_s += _FIRST_CYCLES * self._planner.cycle_s(PLAIN, load)
            self._hurry = _FIRST_TREES // load.num_requests
        self._hope = max(outlook.hope, _LEAST_HOPE)
        if not plan.is_plain:
            self._num_fruitless[load.num_places] = 0
        is_due = self._num_cycles - self._last_new >= _NEW_TEXT_CYCLES
        if self._are_new and is_due and load.num_requests <= _FEW_REQUESTS:
            # What few said before says little of another text.
            self._num_fruitless[load.num_places] //= 2
            self._last_new = self._num_cycles
        self._are_new = False
        since = self._num_cycles - self._last_probe
        allowed_s = self._saved_s
        if self._hurry > 0 and plan.is_plain:
            allowed_s += _FOLLOW_UP_CYCLES * self._cycle_s
            since = max(since, _MIN_INTERVAL)
        if (
            since < self._interval(plan, load)
            or (self._is_out and since < _LONG_WAIT)
            or allowed_s < 0
        ):
            return None
        if outlook.promising is None:
            return None
        self._num_turns += 1
        usual_rate = self._planner.rate(plan, load)
        gain = usual_rate / outlook.plain_rate
        for probe in self._options(plan, outlook.promising, load, gain):
            loss_s = self._planner.loss_s(probe, load, usual_rate)
            if loss_s <= allowed_s:
                self._hurry = max(0, self._hurry - 1)
                self._last_probe = self._num_cycles
                self.num_probes += 1
                self._num_fruitless[load.num_places] += plan.is_plain
                if probe.is_plain:
                    self._saved_s -= loss_s  # what a plain cycle loses is known beforehand
                else:
                    self._is_out = True
                return probe
        self._last_probe = self._num_cycles  # look again, but not in every cycle
        return None

    def _interval(self, plan: DraftPlan, load: Load) -> int:
        """Cycles between probes."""
        if load.menu is None:
            return _MIN_INTERVAL
        if plan.is_plain:
            first = min(max(load.num_requests, _MIN_INTERVAL), _MIN_INTERVAL_CAPTURED)
            # Of few requests one probe says little.
            per_doubling = max(_PROBES_PER_DOUBLING, _FIRST_TREES // 2 // load.num_requests)
            num_doublings = self._num_fruitless[load.num_places] // per_doubling
            return min(first << num_doublings, _LONGEST_INTERVAL)
        return _MIN_INTERVAL_CAPTURED

    def _options(
        self, plan: DraftPlan, promising: DraftPlan, load: Load, gain: float
    ) -> Iterator[DraftPlan]:
        """Cycles that would tell something, the best first; `gain` is the plan's over plain."""
        if load.menu is not None:
            return self._from_menu(plan, load, gain < _SURELY_BETTER_CAPTURED)
        if plan.is_plain:
            return self._drafting(promising, load)
        return self._other(plan, promising, load, gain < _SURELY_BETTER)

    def _from_menu(self, plan: DraftPlan, load: Load, is_plain_near: bool) -> Iterator[DraftPlan]:
        """Captured plans only: a larger tree tells what it and all smaller ones would yield.

        While drafting, those that would have to turn out far better to be of use are rarely asked.
        """
        assert load.menu is not None
        ready = [one for one in load.menu.drafting if one in load.menu.ready]
        larger = [one for one in ready if (one.depth, one.width) > (plan.depth, plan.width)]
        if not plan.is_plain:
            if is_plain_near and self._num_turns % 4 == 0:
                yield PLAIN
            if self._num_turns % _PROBES_PER_DOUBT != 1:
                least = _HOPEFUL * self._planner.rate(plan, load)
                larger = [one for one in larger if self._planner.rate(one, load) >= least]
            larger.reverse()
        yield from (replace(one, is_measured=True, is_probe=True) for one in larger)

    def _drafting(self, best: DraftPlan, load: Load) -> Iterator[DraftPlan]:
        """From plain decoding: drafts for as many requests as possible."""
        widest = self._model.widths[-1]
        fewest = max(1, round(_FEWEST * load.num_requests))
        most = 1 << (load.num_requests.bit_length() - 1)
        counts = [most >> i for i in range(most.bit_length()) if most >> i >= fewest]
        if self.num_probes % 4 == 0:
            yield from (self._for_some(count, self._tree.depth, widest, best) for count in counts)
        for count in counts:
            if self.num_probes % 2 == 1:
                yield self._for_some(count, best.depth, best.width, best)
            else:
                # Deep enough for as many nodes as the plan would have: its pass is timed too.
                wanted = -(-best.nodes // count) - widest
                depth = min(max(best.depth, 1 - (-wanted // widest**2)), self._tree.depth)
                yield self._for_some(count, depth, widest, best)

    def _for_some(self, count: int, depth: int, width: int, best: DraftPlan) -> DraftPlan:
        num_candidates = width + (depth - 1) * width**2
        nodes = min(best.nodes, count * min(num_candidates, self._tree.budget))
        return DraftPlan(depth, width, nodes, num_drafted=count, is_measured=True, is_probe=True)

    def _other(
        self, plan: DraftPlan, promising: DraftPlan, load: Load, is_plain_near: bool
    ) -> Iterator[DraftPlan]:
        """From drafting: no drafts, the largest tree, more nodes, or the next larger tree."""
        turn = self.num_probes % 4
        is_plain_known = self._costs.num_plain_seen(load) >= _WELL_KNOWN
        is_doubtful = not is_plain_known or self.num_probes % _PROBES_PER_DOUBT == 3
        if is_doubtful or (is_plain_near and turn == 3):
            yield PLAIN
        if is_doubtful:
            # Plain decoding that was timed badly once makes any drafting look good: nothing else is
            # worth asking until that is settled.
            return
        widths = self._model.widths
        next_depth = min(plan.depth + 1, self._tree.depth)
        next_width = widths[min(self._model.preset(plan.width) + 1, len(widths) - 1)]
        shapes = [
            (next_depth, next_width, plan.nodes),
            (plan.depth, next_width, plan.nodes),
            (next_depth, plan.width, plan.nodes),
        ]
        if turn == 0:
            shapes.insert(0, (self._tree.depth, widths[-1], plan.nodes))
        if turn == 2:
            # Times of other sizes would be believed, wrong or not, if no pass had them.
            more = min(2 * plan.nodes, self._planner.max_nodes(load))
            fewer = max(1, plan.nodes // 2)
            is_more = self.num_probes % 8 == 2
            shapes.insert(0, (next_depth, next_width, more if is_more else fewer))
            if promising.nodes != plan.nodes:
                shapes.insert(0, (promising.depth, promising.width, promising.nodes))
        for depth, width, nodes in shapes:
            if (depth, width, nodes) != (plan.depth, plan.width, plan.nodes):
                yield DraftPlan(depth, width, nodes, is_measured=True, is_probe=True)
