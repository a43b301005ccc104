"""Who proposes tokens. The engine asks a drafter for one tree per request and verifies them.

Legend: T rows of a pass, F tapped features, B requests.
"""

from collections.abc import Sequence as Many
from typing import Protocol

import torch
from torch import Tensor

from fledge.engine.cache import PagedCache
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.sequence import Sequence
from fledge.ops.accept import Walk
from fledge.ops.paged import TreePass
from fledge.ops.tree import TreeBatch, root_only


class Drafter(Protocol):
    """Proposes what the target may say next."""

    taps: tuple[int, ...]
    """Completed target layers whose features it reads; empty for none."""

    num_scratch: int
    """Cache slots a request needs behind its newest token to be drafted for."""

    window: int | None
    """How far back it attends, None for all; its memory lies in the blocks of that kind."""

    bytes_per_slot: int
    """What one token costs in its memory; 0 when it has none."""

    weight_bytes: int

    def attach(self, cache: PagedCache) -> None:
        """The memory it shares with the target from now on."""

    def remember(self, features_TF: Tensor, packed: TreePass) -> None:
        """The target has read these rows; keep what is needed of their features."""

    def catch_up(self, sequences: Many[Sequence]) -> None:
        """Read the committed tokens that were not read yet."""

    def draft(self, sequences: Many[Sequence], plan: DraftPlan) -> TreeBatch:
        """One tree per request, rooted at its newest token."""

    def observe(self, trees: TreeBatch, walk: Walk, sampled_B: Tensor) -> None:
        """What the target made of the drafts."""


class MemorylessDrafter:
    """Drafts from something other than the target's features: nothing to keep, nothing to learn."""

    taps: tuple[int, ...] = ()
    num_scratch = 0
    window: int | None = None
    bytes_per_slot = 0
    weight_bytes = 0

    def attach(self, cache: PagedCache) -> None:
        del cache

    def remember(self, features_TF: Tensor, packed: TreePass) -> None:
        del features_TF, packed

    def catch_up(self, sequences: Many[Sequence]) -> None:
        del sequences

    def observe(self, trees: TreeBatch, walk: Walk, sampled_B: Tensor) -> None:
        del trees, walk, sampled_B


class NoDrafter(MemorylessDrafter):
    """Plain decoding: every tree is a root."""

    def draft(self, sequences: Many[Sequence], plan: DraftPlan) -> TreeBatch:
        del plan
        return root_only(torch.tensor([seq.newest_token_id for seq in sequences]))
