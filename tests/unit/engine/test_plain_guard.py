"""Drafting that yields less than plain decoding pauses, where it does and nowhere else."""

from fledge.engine.draft_plan import CycleReport, DraftPlan, Load
from fledge.engine.plain_guard import PlainGuards


def report(num_requests: int, emitted: int, seconds: float = 0.01) -> CycleReport:
    return CycleReport(
        plan=DraftPlan(2, 1, 2 * num_requests),
        load=Load(num_requests=num_requests),
        target_s=seconds,
        draft_s=0.0,
        other_s=0.0,
        emitted=emitted,
        num_extended=num_requests,
    )


def test_gains_of_few_requests_do_not_hide_losses_of_many() -> None:
    guards = PlainGuards()
    few, many = Load(num_requests=4), Load(num_requests=256)
    for turn in range(40):
        guards.of(few).observe(report(4, 10 + turn % 3), plain_rate=400.0)
        guards.of(many).observe(report(256, 230 + turn % 9), plain_rate=25_600.0)
    assert guards.of(many).is_pausing
    assert not guards.of(few).is_pausing
    assert guards.of(Load(num_requests=5)) is guards.of(few)


def test_one_stutter_hides_nothing() -> None:
    guards = PlainGuards()
    guard = guards.of(Load(num_requests=256))
    guard.observe(report(256, 256, seconds=2.0), plain_rate=25_600.0)
    for turn in range(40):
        guard.observe(report(256, 230 + turn % 9), plain_rate=25_600.0)
    assert guard.is_pausing
