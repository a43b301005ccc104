"""Who runs and who gives way: memory goes to the important, clients pay for what they get.

Catches: a request that gives way to a lesser one, one that queues again behind others, what was
said counted twice after a preemption, and a crowd that keeps a single client waiting.
"""

import pytest

from fledge.engine.scheduler import importance
from fledge.engine.sequence import Sequence
from tests.unit.engine.oracle_target import oracle_drafter, oracle_engine
from tests.unit.engine.scheduler_support import TREE, add, check_answers, prompt, run


def test_when_memory_runs_out_the_least_important_gives_way() -> None:
    """Three rows, memory for less; whoever is preempted is the least important one running."""
    engine, _ = oracle_engine(cache_tokens=60, max_requests=3)
    scheduler = engine._scheduler
    preempt, order = scheduler.preempt, []

    def watched(seq: Sequence) -> None:
        assert seq is min(scheduler.running, key=importance)
        order.append(seq)
        preempt(seq)

    scheduler.preempt = watched
    ranks = [0, 2, 1]
    sequences = [add(engine, prompt(6, seed), 40, priority=ranks[seed]) for seed in range(3)]
    run(engine)
    check_answers(sequences)
    assert sequences[1].num_preemptions == 0
    assert sequences[0].num_preemptions > 0
    assert engine.stats.num_preemptions == sum(seq.num_preemptions for seq in sequences)
    assert order[0] is sequences[0]


def test_of_equals_the_latest_gives_way() -> None:
    engine, _ = oracle_engine(cache_tokens=60, max_requests=3)
    sequences = [add(engine, prompt(6, seed), 40) for seed in range(3)]
    run(engine)
    check_answers(sequences)
    assert sequences[0].num_preemptions == 0
    assert sequences[2].num_preemptions > 0


@pytest.mark.parametrize("scarce", ["rows", "memory"])
def test_an_urgent_request_takes_the_place_of_a_running_one(scarce: str) -> None:
    if scarce == "rows":
        engine, _ = oracle_engine(max_requests=2)
    else:
        engine, _ = oracle_engine(max_requests=4, cache_tokens=48)
    low = [add(engine, prompt(16, seed), 20) for seed in range(2)]
    engine.step()
    engine.step()
    assert all(seq.is_decoding for seq in low)
    urgent = add(engine, prompt(17, 9), 3, priority=1)
    engine.step()
    assert urgent.output_ids, "it was read in the very next pass"
    assert low[0].row >= 0, "of the two, the later one gave way"
    assert low[1].num_preemptions == 1
    run(engine)
    check_answers([*low, urgent])


@pytest.mark.parametrize("priority", [0, -1])
def test_others_wait_for_a_running_request_to_end(priority: int) -> None:
    engine, _ = oracle_engine(max_requests=2)
    running = [add(engine, prompt(6, seed), 20) for seed in range(2)]
    engine.step()
    waiting = add(engine, prompt(6, 9), 3, priority=priority)
    for _ in range(10):
        engine.step()
    assert (waiting.row, engine.stats.num_waiting) == (-1, 1)
    run(engine)
    assert engine.stats.num_preemptions == 0
    check_answers([*running, waiting])


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """It keeps what it said and finds most of its entries again."""
    engine, target = oracle_engine()
    seq = add(engine, prompt(30), 20)
    for _ in range(8):
        engine.step()
    said = list(seq.output_ids)
    engine.preempt(seq)
    assert (seq.row, engine.stats.num_running, engine.stats.num_waiting) == (-1, 0, 1)
    assert engine.stats.cache_usage == 0
    target.num_rows.clear()
    engine.step()
    assert target.num_rows == [1], "only the newest token is read again"
    assert seq.output_ids[: len(said)] == said
    engine.preempt(seq)
    engine.preempt(seq)  # it is waiting already
    run(engine)
    check_answers([seq])
    assert seq.completion().stats.num_preemptions == 2


def test_a_preempted_request_does_not_queue_again_behind_others() -> None:
    engine, _ = oracle_engine(max_requests=1)
    seq, other = add(engine, prompt(6, 1), 5), add(engine, prompt(6, 2), 5)
    engine.step()
    engine.preempt(seq)
    while not seq.is_finished:
        engine.step()
    assert not other.output_ids
    run(engine)
    check_answers([seq, other])


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("params", [{"frequency_penalty": 1.5}, {"repetition_penalty": 3.0}])
def test_what_was_said_is_counted_anew_after_each_preemption(
    params: dict[str, float], drafts: bool
) -> None:
    """Alone, so that the batch looks the same before and after."""
    drafter = oracle_drafter([prompt(6), prompt(9, 3)]) if drafts else None
    plain, _ = oracle_engine()
    wanted = add(plain, prompt(6), 30, params=params)
    run(plain)
    engine, _ = oracle_engine(drafter=drafter, tree=TREE)
    seq = add(engine, prompt(6), 30, params=params)
    other = add(engine, prompt(9, 3), 30, params=params)
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if step % 3 == 0 and seq.row >= 0:
            engine.preempt(seq)
        if step == 4:
            engine.abort([other])
    assert seq.output_ids == wanted.output_ids
    assert engine._counts.num_open == 0


def test_a_client_with_one_request_does_not_wait_for_a_crowd() -> None:
    engine, _ = oracle_engine(max_requests=1)
    crowd = [add(engine, prompt(6, seed), 5, client="crowd") for seed in range(30)]
    engine.step()
    single = add(engine, prompt(6, 99), 5, client="single")
    while not single.is_finished:
        engine.step()
    assert sum(seq.is_finished for seq in crowd) == 1
    run(engine)
    check_answers([*crowd, single])


def test_clients_pay_for_what_is_read_and_for_what_is_said() -> None:
    """Long questions with short answers, and the other way round: both get the same."""
    engine, _ = oracle_engine(max_requests=1)
    talkers = [add(engine, prompt(2, seed), 20, client="talker") for seed in range(12)]
    readers = [add(engine, prompt(20, 50 + seed), 2, client="reader") for seed in range(12)]
    while sum(seq.is_finished for seq in [*talkers, *readers]) < 12:
        engine.step()
    assert 5 <= sum(seq.is_finished for seq in talkers) <= 7


def test_clients_pay_once_and_not_for_what_was_kept() -> None:
    engine, _ = oracle_engine(max_requests=1)
    scheduler = engine._scheduler
    add(engine, prompt(9, 1), 1, client="other")
    seq = add(engine, prompt(8), 6, client="payer", priority=1)
    for _ in range(4):
        engine.step()
    engine.preempt(seq)
    while not seq.is_finished:
        engine.step()
    assert scheduler._queue._served["payer"] == 8 + 6
    again = add(engine, prompt(8), 2, client="payer", priority=1)
    while not again.is_finished:
        engine.step()
    assert scheduler._queue._served["payer"] == 8 + 6 + 1 + 2, "one token of the prompt was read"
