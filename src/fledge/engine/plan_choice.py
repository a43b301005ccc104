"""What the next cycle is to draft: the controller is asked, and its answer kept while it waits."""

from collections.abc import Callable
from collections.abc import Sequence as Many

from fledge.engine.draft_plan import PLAIN, Controller, DraftPlan, Load, Menu
from fledge.engine.sequence import Sequence

_ENOUGH_REQUESTS = 32
"""That say what all of them have left to say."""


class PlanChoice:
    """The plan in use."""

    def __init__(
        self,
        controller: Controller,
        menu: Callable[[int], tuple[int, Menu | None]],
        *,
        can_draft: bool,
        max_pass_tokens: int,
    ) -> None:
        self.controller, self._menu, self._can_draft = controller, menu, can_draft
        # However much there is to read, a quarter of the pass is open for drafts.
        self._most_other_tokens = max_pass_tokens * 3 // 4
        self.plan: DraftPlan = PLAIN
        self.is_waiting = False
        """Whether the plan is one that cycles in flight have to end for."""

    @property
    def is_asleep(self) -> bool:
        """Whether the head sleeps: cycles are those of an engine without one."""
        return self._can_draft and self.controller.is_asleep

    @property
    def is_exam(self) -> bool:
        return self._can_draft and self.controller.is_exam

    def meets_requests(self, *, has_room: bool) -> bool:
        """Requests are about to start; whether the head is to be told of them."""
        return self._can_draft and self.controller.meets_requests(has_room=has_room)

    @property
    def expects_drafts(self) -> bool:
        """Whether requests that come now are likely to be drafted for."""
        return self._can_draft and self.controller.expects_drafts

    def choose(self, load: Load) -> None:
        """Have the controller plan, unless what it planned last still waits to be run."""
        has_waited = self.is_waiting and not self.is_asleep
        self.is_waiting = False
        if has_waited:
            return
        if load.unread and self._can_draft and self._are_most_told(load):
            self.plan = self.controller.choose(load)
        elif load.num_requests:
            self.plan = PLAIN

    def _are_most_told(self, load: Load) -> bool:
        """Not while most came when the head slept: they would wait for drafts of others."""
        return self.is_exam or 2 * load.num_lacking <= load.num_requests

    def load(self, decoding: Many[Sequence], num_unread: int = 0) -> Load:
        """What requests that decode bring to a pass, beside so many tokens of prompts."""
        if not self._can_draft or self.is_asleep:  # nobody asks for more
            return Load(len(decoding), num_other_tokens=min(num_unread, self._most_other_tokens))
        num_places, menu = self._menu(len(decoding)) if decoding else (0, None)
        return Load(
            num_requests=len(decoding),
            num_other_tokens=min(num_unread, self._most_other_tokens),
            context_tokens=sum(seq.kv_len for seq in decoding),
            tokens_left=None if self.expects_drafts else _tokens_left(decoding),
            unread=tuple(seq.len - seq.head_len for seq in decoding if seq.may_have_drafts),
            num_lacking=sum(seq.lacks_features for seq in decoding),
            num_places=num_places,
            menu=menu,
        )


def _tokens_left(decoding: Many[Sequence]) -> int:
    """What these may say yet, at most; of many a part is looked at, since every cycle asks."""
    part = decoding[:: max(1, len(decoding) // _ENOUGH_REQUESTS)]
    left = sum(seq.request.max_new_tokens - len(seq.output_ids) for seq in part)
    return left * len(decoding) // max(1, len(part))
