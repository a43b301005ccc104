"""How requests end: answered, cancelled, refused beforehand or failed alone; none runs for ever.

Catches: memory that a cancelled request keeps, requests that never end, one that cannot fit and is
taken, and a failure that takes its neighbours or the engine along.
"""

import random
import time
from typing import Any

import pytest

from fledge import SamplingParams, TreeSettings
from fledge.contracts.errors import CapacityError, ConfigError, RequestError
from fledge.engine.sequence import Sequence
from tests.unit.engine.oracle_target import POISON, answer, oracle_drafter, oracle_engine
from tests.unit.engine.scheduler_support import TREE, add, assert_idle, check_answers, prompt, run


def test_cancelling_frees_at_once_wherever_a_request_is() -> None:
    engine, _ = oracle_engine(max_requests=3, max_pass_tokens=16)
    decoding = add(engine, prompt(5, 1), 50)
    engine.step()
    preempted = add(engine, prompt(5, 2), 50)
    engine.step()
    engine.step()
    reading = add(engine, prompt(60, 3), 50)
    engine.step()
    engine.preempt(preempted)
    waiting = [add(engine, prompt(5, seed), 50, priority=-1) for seed in (4, 5)]
    assert decoding.is_decoding
    assert 0 < reading.kv_len < 60
    engine.abort([waiting[0]])
    assert engine.stats.num_waiting == 2
    engine.abort([preempted])
    assert engine.stats.num_waiting == 1
    used = engine.stats.cache_usage
    engine.abort([reading])
    assert engine.stats.cache_usage < used
    engine.check_integrity()
    engine.abort([decoding])
    assert engine.stats.cache_usage == 0
    assert (engine.stats.num_running, engine.stats.num_waiting) == (0, 1)
    engine.abort([decoding, reading, preempted, waiting[0]])  # once is enough, twice is harmless
    run(engine)
    check_answers([waiting[1]])
    assert engine.stats.num_finished == 1
    assert_idle(engine)


def test_what_a_cancelled_request_has_read_is_still_of_use() -> None:
    engine, _ = oracle_engine()
    seq = add(engine, prompt(20), 50)
    engine.step()
    engine.step()
    engine.abort([seq])
    again = add(engine, prompt(20), 4)
    run(engine)
    assert again.num_prompt_reused == 19
    check_answers([again])


def test_thousands_of_requests_wait_and_end() -> None:
    engine, _ = oracle_engine(max_requests=64, max_pass_tokens=256)
    started = time.process_time()
    sequences = [add(engine, [seed % 50, seed // 50], 1 + seed % 2) for seed in range(2500)]
    assert engine.stats.num_waiting == 2500
    engine.abort(sequences[1::5])
    while engine.has_work:
        engine.step()
    assert time.process_time() - started < 60
    assert sum(seq.is_finished for seq in sequences) == 2000
    assert engine.stats.num_finished == 2000
    assert_idle(engine)


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)], ids=str)
@pytest.mark.parametrize("cache_tokens", [40, 64, 4000])
@pytest.mark.parametrize("drafts", [False, True])
def test_every_request_of_a_random_workload_ends(
    windows: tuple[int | None, ...], cache_tokens: int, drafts: bool
) -> None:
    """Priorities, clients, bursts, cancels and preemption; memory for one or two or all."""
    window = max((one for one in windows if one), default=None) if None not in windows else None
    rng = random.Random(cache_tokens)
    stem = prompt(24)
    prompts = [[*stem[: rng.randrange(25)], *prompt(rng.randrange(1, 6), i)] for i in range(24)]
    drafter = oracle_drafter(prompts, window=window, budget=6) if drafts else None
    engine, _ = oracle_engine(
        windows, drafter=drafter, tree=TREE, cache_tokens=cache_tokens, max_pass_tokens=24
    )
    sequences: list[Sequence] = []
    cancelled: list[Sequence] = []
    for _ in range(3000):
        while len(sequences) < len(prompts) and rng.random() < 0.3:
            options = {"priority": rng.randrange(3), "client": rng.choice("abc")}
            asked = prompts[len(sequences)]
            sequences.append(add(engine, asked, rng.randrange(1, 12), **options))
        alive = [seq for seq in sequences if not seq.has_ended and seq not in cancelled]
        if alive and rng.random() < 0.03:
            cancelled.append(rng.choice(alive))
            engine.abort(cancelled[-1:])
        if alive and rng.random() < 0.05:
            engine.preempt(rng.choice(alive))
        if engine.has_work:
            engine.step()
        engine.check_integrity()
        if not engine.has_work and len(sequences) == len(prompts):
            break
    assert_idle(engine)
    finished = [seq for seq in sequences if seq not in cancelled]
    assert len(finished) > 10
    check_answers(finished, window)


def test_a_request_longer_than_the_memory_is_refused_with_both_numbers() -> None:
    engine, _ = oracle_engine(cache_tokens=40)
    engine.make_request(prompt(30), SamplingParams(max_tokens=11))
    with pytest.raises(RequestError) as caught:
        engine.make_request(prompt(30), SamplingParams(max_tokens=12))
    message = str(caught.value)
    assert (
        "may need 41 tokens of cache memory (30 of the prompt and up to 12 of the answer)"
        in message
    )
    assert "the engine has 40" in message
    assert "cache_tokens" in message
    seq = add(engine, prompt(30), 11)
    run(engine)
    check_answers([seq])


def test_window_layers_alone_hold_requests_of_any_length() -> None:
    engine, _ = oracle_engine((8,), cache_tokens=12)
    seq = add(engine, prompt(200), 40)
    run(engine)
    check_answers([seq], window=8)


def test_a_window_that_does_not_fit_the_memory_limits_requests() -> None:
    """Two blocks of four cannot move a window of eight on: nine tokens would wait for ever."""
    engine, _ = oracle_engine((8,), cache_tokens=8)
    with pytest.raises(RequestError, match="may need 9 tokens .* the engine has 8"):
        engine.make_request(prompt(5), SamplingParams(max_tokens=5))
    seq = add(engine, prompt(5), 4)
    run(engine)
    check_answers([seq], window=8)


def test_memory_for_less_than_a_question_and_an_answer() -> None:
    with pytest.raises(CapacityError, match="holds 1 token.*cache_tokens is 1, raise it"):
        oracle_engine(cache_tokens=1, block_size=1)
    engine, _ = oracle_engine(cache_tokens=2, block_size=1)
    seq = add(engine, prompt(1), 2)
    run(engine)
    check_answers([seq])


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="tree budget is 0; it must be between 1 and 1024"):
        oracle_engine(tree=TreeSettings(budget=0))


@pytest.mark.parametrize("max_pass_tokens", [64, 8])
def test_logits_that_are_no_numbers_fail_one_request_and_no_other(max_pass_tokens: int) -> None:
    """Whether the prompt is read at once or in parts, of which some are known to others."""
    engine, _ = oracle_engine(max_pass_tokens=max_pass_tokens)
    good = [add(engine, prompt(8, seed), 10) for seed in range(2)]
    asked = [*prompt(9, 5), POISON, *prompt(12, 6)]
    bad = add(engine, asked, 10)
    run(engine)
    check_answers(good)
    assert not bad.is_finished
    assert "after token 22 of this request are not numbers" in str(bad.error)
    assert (engine.stats.num_failed, engine.stats.num_finished) == (1, 2)
    assert_idle(engine)
    again = add(engine, asked[:9], 4)
    run(engine)
    check_answers([again])
    assert again.num_prompt_reused == 0, "nothing of a failed request is used again"


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("params", [{}, {"presence_penalty": 1.5}])
def test_a_draft_without_numbers_costs_a_cycle_and_nothing_else(
    params: dict[str, float], is_alone: bool
) -> None:
    """Its neighbours in the tree have no numbers either; asked again without drafts, they do.

    What the failed walk has said is not counted for penalties.
    """
    asked, other = prompt(8), prompt(5, 3)
    drafter = oracle_drafter([asked, other], accuracy=1.0, depth=3, width=2, budget=4)
    right = answer(asked, 30)
    drafter._answers[tuple(asked)] = [*right[:6], POISON, *right[7:]]
    engine, _ = oracle_engine(drafter=drafter, tree=TREE)
    plain, _ = oracle_engine()
    sequences, wanted = (
        [add(engine, asked, 20, params=params)],
        [add(plain, asked, 20, params=params)],
    )
    if not is_alone:
        sequences.append(add(engine, other, 20))
        wanted.append(add(plain, other, 20))
    run(engine)
    run(plain)
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in wanted]
    assert engine.stats.num_failed == 0
    # Two cycles find the poison among their drafts and say nothing.
    assert engine.stats.num_request_cycles == sum(seq.cycles for seq in sequences) + 2


@pytest.mark.parametrize("failing", ["start", "reserve", "release"])
def test_an_error_while_planning_leaves_an_engine_that_works(failing: str) -> None:
    """Memory for a copy may run out, or somebody presses Ctrl-C, in the middle of admission."""
    engine, _ = oracle_engine(max_requests=1 if failing == "release" else 2)
    running = add(engine, prompt(6), 50)
    engine.step()
    real = getattr(engine._cache, failing)
    waiting = add(engine, prompt(6, 2), 5, priority=1)
    third = add(engine, prompt(6, 3), 5, priority=1)

    def fail(seq: Sequence, *args: Any, **options: Any) -> Any:
        if seq is running and failing != "release":
            return real(seq, *args, **options)
        real(seq, *args, **options)
        raise MemoryError

    setattr(engine._cache, failing, fail)
    with pytest.raises(MemoryError):
        engine.step()
    setattr(engine._cache, failing, real)
    engine.check_integrity()
    assert engine.stats.cache_usage == 0
    engine.abort([running, waiting])
    run(engine)
    check_answers([third])
    assert_idle(engine)


def test_a_failed_pass_is_told_and_counted() -> None:
    engine, target = oracle_engine()
    sequences = [add(engine, prompt(6, seed), 20) for seed in range(2)]
    engine.step()
    late = add(engine, prompt(6, 7), 4)
    real = target.forward

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError

    target.forward = fail
    late_is_waiting = late.is_waiting
    with pytest.raises(MemoryError):
        engine.step()
    target.forward = real
    assert late_is_waiting
    for seq in [*sequences, late]:
        assert "was dropped" in str(seq.error)
        assert "(MemoryError). Ask again" in str(seq.error)
    assert engine.stats.num_failed == 3
    assert_idle(engine)
    again = add(engine, prompt(6), 5)
    run(engine)
    check_answers([again])
