"""The controller that is asked for by `controller = "fixed"`, and has no need of pass times."""

from fledge.contracts.settings import TreeSettings
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.throughput import Throughput


class FixedController:
    """The same tree in every cycle, as the settings say."""

    is_asleep = is_exam = False

    def __init__(self, tree: TreeSettings, *, max_pass_tokens: int) -> None:
        self._tree = tree
        self._max_pass_tokens = max_pass_tokens
        self._tokens = Throughput()
        self._plan = PLAIN

    @property
    def expects_drafts(self) -> bool:
        return True

    def meets_requests(self, *, has_room: bool) -> bool:
        del has_room
        return True

    def plans(self, num_places: int) -> tuple[DraftPlan, ...]:
        nodes = min(self._tree.num_nodes * num_places, self._max_pass_tokens - num_places)
        return (DraftPlan(self._tree.depth, self._tree.width, nodes),) if nodes > 0 else ()

    def choose(self, load: Load) -> DraftPlan:
        if load.menu is not None:
            self._plan = load.menu.drafting[0] if load.menu.drafting else PLAIN
            return self._plan
        # Drafts go before prompts, which get at least one token of every pass.
        room = self._max_pass_tokens - load.num_requests - 1
        nodes = min(self._tree.num_nodes * load.num_requests, room)
        self._plan = DraftPlan(self._tree.depth, self._tree.width, nodes) if nodes > 0 else PLAIN
        return self._plan

    def observe(self, report: CycleReport) -> None:
        self._tokens.add(report)

    def state(self) -> dict[str, object]:
        return {"controller": "fixed", "plan": self._plan.shown(), **self._tokens.state()}
