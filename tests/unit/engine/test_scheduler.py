"""Who runs and who waits: streams never stall, memory goes to the important, everybody ends.

Catches: a long prompt that stops the others, a pass larger than allowed, a request that gives way
to a lesser one, an urgent one that waits behind idle ones, memory that a cancelled request keeps, a
prompt read twice at once, drafts that cost a neighbour its memory, and requests that never end.
The target is one that tells from what it sees what it says, so every answer is checked as well.
"""

import random
import time
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import CapacityError, ConfigError, RequestError
from fledge.engine.scheduler import importance
from fledge.engine.sequence import Sequence
from fledge.testing import target_of, tiny_head, tiny_model
from tests.unit.engine.oracle_target import POISON, answer, oracle_drafter, oracle_engine

TREE = TreeSettings(depth=4, width=3, budget=10)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(POISON) for _ in range(length)]


def add(engine: Engine, asked: list[int], max_tokens: int = 20, **options: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **options.pop("params", {}))
    return engine.add(engine.make_request(asked, params), **options)


def run(engine: Engine, *, most_steps: int = 2000) -> None:
    for _ in range(most_steps):
        if not engine.has_work:
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError(f"there is still work after {most_steps} steps")


def check_answers(sequences: list[Sequence], window: int | None = None) -> None:
    for seq in sequences:
        assert seq.is_finished
        asked = list(seq.request.prompt_token_ids)
        assert seq.output_ids == answer(asked, len(seq.output_ids), window)


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.stats.cache_usage == 0
    engine.check_integrity()


def test_a_long_prompt_is_read_beside_the_streams() -> None:
    engine, target = oracle_engine(max_pass_tokens=32)
    streams = [add(engine, prompt(5, seed), 60) for seed in range(3)]
    engine.step()
    long = add(engine, prompt(300, 9), 5)
    target.num_rows.clear()
    num_steps = 0
    while not long.output_ids:
        said = [len(seq.output_ids) for seq in streams]
        engine.step()
        num_steps += 1
        assert [len(seq.output_ids) for seq in streams] == [count + 1 for count in said]
    assert num_steps == -(-300 // (32 - 3)), "the room that streams leave is used"
    assert max(target.num_rows) == 32
    run(engine)
    check_answers([*streams, long])


def test_no_pass_is_larger_than_allowed() -> None:
    """Drafts, chunks and streams together, with a real head; drafts leave room for prompts."""
    target = target_of(tiny_model("llama"))
    settings = EngineSettings(tree=TREE, max_requests=5, max_pass_tokens=17, block_size=4)
    engine = Engine(target, tiny_head(target), settings)
    sizes = []
    real = target.forward

    def forward(packed: Any, *args: Any, **options: Any) -> Any:
        sizes.append(packed.num_tokens)
        return real(packed, *args, **options)

    target.forward = forward
    rng = random.Random(0)
    sequences = []
    while len(sequences) < 12 or engine.has_work:
        if len(sequences) < 12:
            asked = [rng.randrange(3, 97) for _ in range(rng.choice([1, 9, 70]))]
            sequences.append(add(engine, asked, 8, params={"ignore_eos": True}))
        decoding = [seq for seq in sequences if seq.is_decoding and seq.row >= 0]
        said = [len(seq.output_ids) for seq in decoding]
        engine.step()
        for seq, before in zip(decoding, said, strict=True):
            assert len(seq.output_ids) > before
    assert max(sizes) == 17
    assert engine.stats.num_drafts > 0
    del target.forward


def test_a_prompt_moves_on_even_where_drafts_would_fill_the_pass() -> None:
    prompts = [prompt(6, seed) for seed in range(3)]
    engine, _ = oracle_engine(
        drafter=oracle_drafter(prompts, budget=9), tree=TREE, max_pass_tokens=32
    )
    streams = [add(engine, one, 100) for one in prompts[:2]]
    engine.step()
    long = add(engine, prompt(60, 7), 1)
    for _ in range(60):
        if long.is_finished:
            break
        engine.step()
    assert long.is_finished
    engine.abort(streams)


def test_drafts_keep_their_part_of_a_pass_while_prompts_are_read() -> None:
    asked = prompt(6)
    engine, target = oracle_engine(
        drafter=oracle_drafter([asked], accuracy=1.0, budget=10), tree=TREE, max_pass_tokens=32
    )
    stream = add(engine, asked, 100)
    engine.step()
    long = add(engine, prompt(60, 7), 1)
    while not long.is_finished:
        said = len(stream.output_ids)
        engine.step()
        assert len(stream.output_ids) == said + 5
    assert max(target.num_rows) == 32
    engine.abort([stream])


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("block_size", [1, 4])
def test_an_answer_cut_short_of_what_was_accepted_leaves_true_entries(
    block_size: int, max_tokens: int
) -> None:
    """The limit falls anywhere inside what one pass accepts; what is kept is used again."""
    asked = prompt(6)
    drafter = oracle_drafter([asked], accuracy=1.0, budget=4)
    engine, _ = oracle_engine(drafter=drafter, tree=TREE, block_size=block_size)
    first = add(engine, asked, max_tokens)
    run(engine)
    asked = [*asked, *first.output_ids, 3]
    drafter._answers[tuple(asked)] = answer(asked, 50)
    second = add(engine, asked, 8)
    run(engine)
    check_answers([first, second])
    assert second.num_prompt_reused >= len(asked) - 2


def test_prompts_are_read_in_the_order_of_importance() -> None:
    engine, _ = oracle_engine(max_pass_tokens=8)
    late, urgent = add(engine, prompt(20, 1), 1), add(engine, prompt(20, 2), 1, priority=1)
    while not urgent.is_finished:
        engine.step()
    assert late.kv_len <= 8
    run(engine)
    check_answers([late, urgent])


@pytest.mark.parametrize("cache_tokens", [4000, 208])
def test_an_urgent_prompt_is_read_before_the_rest_of_a_long_one(cache_tokens: int) -> None:
    """With little memory it also takes what the long one has read so far."""
    engine, _ = oracle_engine(max_pass_tokens=8, cache_tokens=cache_tokens)
    long = add(engine, prompt(200, 1), 1)
    for _ in range(20):
        engine.step()
    urgent = [add(engine, prompt(20, seed), 3, priority=1) for seed in (2, 3)]
    while not all(seq.is_finished for seq in urgent):
        engine.step()
        engine.check_integrity()
    assert not long.output_ids
    assert (long.num_preemptions > 0) == (cache_tokens == 208)
    run(engine)
    check_answers([long, *urgent])


@pytest.mark.parametrize("num_copies", [2, 7])
@pytest.mark.parametrize("max_pass_tokens", [16, 64])
def test_the_same_prompt_at_the_same_time_is_read_once(
    num_copies: int, max_pass_tokens: int
) -> None:
    engine, target = oracle_engine(max_requests=8, max_pass_tokens=max_pass_tokens)
    sequences = [add(engine, prompt(41), 1) for _ in range(num_copies)]
    run(engine)
    check_answers(sequences)
    reused = sorted(seq.num_prompt_reused for seq in sequences)
    assert reused == [0] + [40] * (num_copies - 1)
    assert sum(target.num_rows) - 1 == 41 + (num_copies - 1)  # one row probes the memory


def test_those_who_share_only_a_beginning_wait_only_for_that() -> None:
    engine, target = oracle_engine(max_pass_tokens=24)
    stem = prompt(16)
    first, second = (add(engine, [*stem, *prompt(20, seed)], 1) for seed in (1, 2))
    engine.step()
    assert (first.row >= 0, second.row >= 0) == (True, False)
    engine.step()
    assert second.row >= 0, "what they share has been read"
    run(engine)
    assert second.num_prompt_reused == 16
    assert sum(target.num_rows) - 1 == 36 + 20


def test_without_sharing_nobody_waits_for_a_twin() -> None:
    engine, target = oracle_engine(share_prefixes=False)
    for _ in range(3):
        add(engine, prompt(12), 2)
    engine.step()
    assert engine.stats.num_running == 3
    assert target.num_rows[-1] == 36
    run(engine)


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


def test_drafts_are_given_up_before_a_request_is() -> None:
    """23 blocks: three requests of 5 and one that needs 8 when they have gone; drafts need 3 each.

    All drafts are wrong, so that all four grow slowly, with room for drafts behind them.
    """
    prompts = [prompt(8, seed) for seed in range(4)]
    engine, _ = oracle_engine(
        drafter=oracle_drafter(prompts, accuracy=0.0, budget=12), tree=TREE, cache_tokens=23 * 4
    )
    sequences = [add(engine, one, 25 if i == 3 else 12) for i, one in enumerate(prompts)]
    run(engine)
    check_answers(sequences)
    assert engine.stats.num_preemptions == 0
    assert engine.stats.offered_at_depth[0] > 20, "and there were drafts"


def test_a_prompt_that_is_being_read_goes_before_drafts() -> None:
    """15 blocks: 7 for a request at its end and 8 for the prompt; drafts would take 3 of these."""
    prompts = [prompt(8), prompt(30, 7)]
    engine, _ = oracle_engine(
        drafter=oracle_drafter(prompts, accuracy=1.0, budget=12),
        tree=TREE,
        cache_tokens=15 * 4,
        max_pass_tokens=19,
    )
    first = add(engine, prompts[0], 20)
    engine.step()
    long = add(engine, prompts[1], 2)
    while not long.output_ids:
        num_read = long.kv_len
        engine.step()
        assert long.kv_len > num_read, "it moves on in every pass"
    assert engine.stats.num_preemptions == 0
    run(engine)
    check_answers([first, long])


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


def test_a_step_without_work_does_nothing() -> None:
    engine, target = oracle_engine()
    target.num_rows.clear()
    engine.step()
    assert target.num_rows == []
    assert engine.stats.num_passes == 0
