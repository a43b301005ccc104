"""Chains of drafts for cycles on a CPU: a head's own, or copied where it agrees or is unsure.

What a chain is copied from and when is said in `ops/copies.py`. The head has read everything that
was committed either way; of a copy it has not read anything, as of drafts that are refused.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from fledge.engine.cache import PagedCache
from fledge.engine.chain_estimates import ChainOutcome
from fledge.engine.chain_planner import ChainPlan, path_probabilities
from fledge.engine.commits import Said
from fledge.engine.head_drafter import FEATURES, HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.engine.token_history import Copy
from fledge.engine.waiting_features import WaitingFeatures
from fledge.models.native_drafts import ChainDrafts, NativeDrafts, Rival
from fledge.models.native_head import NativeHead
from fledge.ops.copies import limit_of, probabilities_of
from fledge.ops.native_chains import TokenChain
from fledge.ops.native_walk import Draw

_MOST_UNREAD = 16
"""Tokens that a head reads on the way to drafting; more are read in passes of their own."""


@dataclass(frozen=True, slots=True)
class HostChain:
    """Drafts of one request."""

    token_ids: Many[int] = ()
    paths: Many[float] = ()
    """How probable the chain is up to each draft."""

    is_copied: bool = False

    def outcome(self, said: Said) -> ChainOutcome:
        return ChainOutcome(self.paths, len(said.tokens) - 1, is_copied=self.is_copied)


@dataclass(frozen=True, slots=True)
class HostDrafted:
    """Drafts of all requests that run."""

    chains: list[HostChain]
    num_levels: int = 0
    """Steps of the head."""

    num_extended: int = 0
    """Committed tokens that the head read."""


class HostDrafts:
    """Drafts over one cache."""

    def __init__(
        self,
        drafter: HeadDrafter,
        head: NativeHead,
        cache: PagedCache,
        waiting: WaitingFeatures,
        *,
        max_requests: int,
        max_depth: int,
        has_copies: bool,
    ) -> None:
        self._drafter, self._waiting, self._has_copies = drafter, waiting, has_copies
        self.native = NativeDrafts(
            head,
            cache.head_memory,
            cache.all_tables,
            waiting.rows_XF,
            features_layer=FEATURES,
            max_requests=max_requests,
            max_rows=max_requests * _MOST_UNREAD,
            max_depth=max_depth,
        )

    def draft(self, running: Many[Sequence], plan: ChainPlan) -> HostDrafted:
        """Chains behind the newest tokens of those who want any."""
        drafting = [seq for seq in running if plan.depth and seq.request.params.speculate]
        if not drafting:
            return no_drafts(running)
        num_extended = sum(seq.len - seq.head_len for seq in drafting)
        copies = self._copies(drafting, plan.depth)
        rivals = [
            Rival(place, copy.token_ids[0], limit_of(copy.match_len))
            for place, copy in copies.items()
        ]
        found = self._ask_head(drafting, plan, rivals)
        won = {rival.place for rival in rivals if rival.wins(found)}
        chains: dict[Sequence, HostChain] = {}
        for place, seq in enumerate(drafting):
            left = seq.request.max_new_tokens - len(seq.output_ids) - 1
            if place in won:
                is_agreed = found.token_ids[place][0] == copies[place].token_ids[0]
                chains[seq] = _copied(copies[place], plan, left, is_agreed=is_agreed)
            else:
                chains[seq] = _own(found, place, plan, left)
        nothing = HostChain()
        return HostDrafted(
            [chains.get(seq, nothing) for seq in running],
            num_levels=found.num_levels,
            num_extended=num_extended,
        )

    def _copies(self, drafting: Many[Sequence], depth: int) -> dict[int, Copy]:
        """What may be copied, by the place of the request."""
        if not self._has_copies:
            return {}
        found = ((place, seq.find_copy(depth)) for place, seq in enumerate(drafting))
        return {place: copy for place, copy in found if copy is not None}

    def _ask_head(
        self, drafting: Many[Sequence], plan: ChainPlan, rivals: Many[Rival]
    ) -> ChainDrafts:
        drafter, waiting = self._drafter, self._waiting
        behind = [seq for seq in drafting if seq.len - seq.head_len > _MOST_UNREAD]
        if behind:
            waiting.hand_over()
            drafter.catch_up(behind)
        chains = [
            TokenChain(seq.row, seq.head_len, seq.token_ids[seq.head_len :], drafter.first_key(seq))
            for seq in drafting
        ]
        is_sampled = not all(seq.request.params.is_greedy for seq in drafting)
        found = self.native.draft(
            chains,
            waiting.slots,
            depth=plan.depth,
            least=plan.least_drafted,
            draws=draws_of(drafting) if drafter.has_noise and is_sampled else None,
            rivals=rivals,
        )
        waiting.slots.clear()
        for seq in drafting:
            seq.head_len = seq.len
        return found


def draws_of(sequences: Many[Sequence]) -> list[Draw]:
    """How these requests choose their next tokens."""
    return [Draw(seq.request.params, len(seq.output_ids)) for seq in sequences]


def no_drafts(running: Many[Sequence]) -> HostDrafted:
    return HostDrafted([HostChain()] * len(running))


def _copied(copy: Copy, plan: ChainPlan, left: int, *, is_agreed: bool) -> HostChain:
    likely = probabilities_of(copy.match_len, len(copy.token_ids), is_agreed=is_agreed)
    paths = path_probabilities(likely)
    count = min(sum(path >= plan.least_copied for path in paths), left)
    return HostChain(copy.token_ids[:count], paths[:count], is_copied=True)


def _own(found: ChainDrafts, place: int, plan: ChainPlan, left: int) -> HostChain:
    paths = path_probabilities(found.probabilities[place])
    count = min(sum(path >= plan.least_verified for path in paths), left)
    return HostChain(found.token_ids[place][:count], paths[:count])
