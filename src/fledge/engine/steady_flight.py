"""What the device was asked for and the host has not read yet: cycles, and passes over prompts."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from torch import Tensor

from fledge.engine.commits import Said
from fledge.engine.device_clock import DeviceClock
from fledge.engine.draft_plan import CycleReport, DraftPlan, Load
from fledge.engine.sequence import Sequence
from fledge.ops.settle import FIRST_TOKEN


@dataclass(slots=True, eq=False)
class Member:
    """A request's stay among those that run ahead; one that comes back is another member."""

    sequence: Sequence
    is_drafted: bool
    num_preemptions: int
    """Of the request when it came: one that has lost its memory since is not what it was."""

    place: int | None = None
    has_left: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the request has ended or lost its memory."""
        seq = self.sequence  # looked at for everybody in every cycle
        has_ended = seq.finish_reason is not None or seq.error is not None
        return seq.row < 0 or has_ended or seq.num_preemptions != self.num_preemptions


def member_of(seq: Sequence, *, is_drafted: bool) -> Member:
    return Member(seq, is_drafted=is_drafted, num_preemptions=seq.num_preemptions)


def read_members(
    chunks: Many[tuple[Sequence, int]], drafted: Many[bool], *, with_head: bool
) -> list[Member | None]:
    """Parts of prompts are read, with the head or without; who is read to its end is a member."""
    members: list[Member | None] = []
    for (seq, chunk), is_drafted in zip(chunks, drafted, strict=True):
        is_last = chunk == seq.num_unread
        if with_head and not seq.lacks_features and seq.head_len == max(1, seq.kv_len):
            seq.head_len = seq.kv_len + chunk
        seq.kv_len += chunk
        members.append(member_of(seq, is_drafted=is_drafted) if is_last else None)
    return members


def has_more_to_say(member: Member | None) -> bool:
    """Whether somebody is there who goes on behind the next token, as far as is known."""
    if member is None:
        return False
    seq = member.sequence
    return len(seq.output_ids) + 1 < seq.request.max_new_tokens


def fresh_tokens(member: Member) -> list[int]:
    """Its newest tokens: those that the head has not read, or the last alone."""
    seq = member.sequence
    return seq.token_ids[seq.head_len :] if member.is_drafted else seq.token_ids[-1:]


@dataclass(frozen=True, slots=True)
class Started:
    """A cycle, or a pass over prompts, that the device was asked for."""

    plan: DraftPlan
    load: Load
    members: list[Member | None]
    """Who is in each column of the facts."""

    facts_XB: Tensor
    gains: Tensor | None
    clock: DeviceClock
    is_cold: bool
    """Whether something of it was compiled or captured."""

    num_caught_up: int | None = None
    """Tokens that heads read before it began; None where it went on behind another one."""

    has_head_read: bool = False
    """Whether the head has read what was said before, to draft or to be able to."""

    asking_s: float = 0.0
    """What the host took to ask for it."""

    is_reading: bool = False


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of it, on the host."""

    started: Started
    said: dict[Member, Said]
    """Of those who have not left."""

    draft_s: float
    target_s: float


def collect(one: Started) -> Collected:
    """Wait for it and read it."""
    draft_s, target_s = one.clock.wait()
    has_nodes, was_decoding = not one.plan.is_plain, not one.is_reading
    # What prompts brought was counted when their pass was started.
    num_read = int(was_decoding)
    said = {}
    for member, facts in zip(one.members, one.facts_XB.t().tolist(), strict=False):
        if member is None or member.has_left or member.is_gone:
            continue
        length, offered, failed, copied = facts[:FIRST_TOKEN]
        said[member] = Said(  # in their order: names take a third longer, for every token
            member.sequence,
            facts[FIRST_TOKEN : FIRST_TOKEN + length],
            offered,
            failed != 0,
            member.is_drafted and has_nodes,
            has_nodes,
            copied != 0,
            num_read,
            was_decoding,
        )
    return Collected(one, said, draft_s=draft_s, target_s=target_s)


def report_of(got: Collected, num_fresh: int, other_s: float) -> CycleReport:
    """What a cycle, or a pass over prompts, took."""
    one, num_said = got.started, 0 if got.started.is_reading else len(got.said)
    num_drafted = sum(said.had_drafts for said in got.said.values())
    everyone = None if num_drafted == num_said else num_drafted
    return CycleReport(
        plan=one.plan if one.is_reading else replace(one.plan, num_drafted=everyone),
        load=replace(one.load, num_requests=num_said),
        target_s=got.target_s,
        draft_s=got.draft_s,
        other_s=other_s,
        emitted=0,
        num_extended=num_fresh + (one.num_caught_up or 0),
        num_just_said=num_fresh if one.num_caught_up is None else 0,
        gains=one.gains,
        is_cold=one.is_cold,
    )
