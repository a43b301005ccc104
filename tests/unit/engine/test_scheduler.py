"""What a pass reads and drafts: streams never stall, prompts move on, nothing is read twice.

Catches: a long prompt that stops the others, a pass larger than allowed, an urgent one that waits
behind idle ones, a prompt read twice at once, and drafts that cost a neighbour its memory. The
target is one that tells from what it sees what it says, so every answer is checked as well.
"""

import random
from typing import Any

import pytest

from fledge import Engine, EngineSettings
from fledge.testing import target_of, tiny_head, tiny_model
from tests.unit.engine.oracle_target import answer, oracle_drafter, oracle_engine
from tests.unit.engine.scheduler_support import TREE, add, check_answers, prompt, run


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


def test_a_step_without_work_does_nothing() -> None:
    engine, target = oracle_engine()
    target.num_rows.clear()
    engine.step()
    assert target.num_rows == []
    assert engine.stats.num_passes == 0
