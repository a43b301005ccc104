"""Questions and answers: what is asked, what is counted, and what a failure costs."""

from pathlib import Path

import pytest
import torch

from fledge.contracts.errors import MeasurementError
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.engine import Engine
from fledge.lab.measure import Answer, Measured, answer_questions, summarise
from fledge.lab.questions import (
    DecodeOptions,
    Question,
    encode_turn,
    make_own_answers,
    make_questions,
    refuse_long,
)
from fledge.lab.suite_prompts import Prompt
from fledge.models.target import Target
from fledge.testing import save_tiny_target, tiny_head

TALK = Prompt(id="1", task="talk", turns=("Hello", "Again", "Once more"))
SHORT = Prompt(id="2", task="short", turns=("Hi",))
OPTIONS = DecodeOptions(max_tokens=6)
SETTINGS = EngineSettings(
    tree=TreeSettings(depth=2, width=2, budget=4),
    controller="fixed",
    max_requests=4,
    share_prefixes=False,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")
    return Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def plain(target: Target) -> Engine:
    return Engine(target, None, SETTINGS)


@pytest.fixture(scope="module")
def questions(plain: Engine) -> tuple[Question, ...]:
    own = make_own_answers(plain, [TALK, SHORT], OPTIONS)
    return make_questions(plain.target, [TALK, SHORT], own)


def test_later_turns_continue_what_the_target_said(
    plain: Engine, questions: tuple[Question, ...]
) -> None:
    assert [one.name for one in questions] == ["talk/1#1", "talk/1#2", "talk/1#3", "short/2"]
    assert [one.is_last for one in questions] == [False, False, True, True]
    first = plain.generate([list(questions[0].token_ids)], questions[0].params(OPTIONS))[0]
    assert questions[1].token_ids == encode_turn(plain.target, TALK, [first.text])
    assert questions[1].token_ids[: len(questions[0].token_ids)] == questions[0].token_ids


def test_conversations_that_are_known_are_not_had_again(plain: Engine) -> None:
    told: list[str] = []
    known = {"talk/1": ["a", "b"]}
    other = Prompt(id="9", task="talk", turns=("x" * 600, "y"))
    found = make_own_answers(
        plain, [TALK, SHORT, other], OPTIONS, known=known, keep=lambda name, _: told.append(name)
    )
    assert found == known, "the other outgrows the context of 512 tokens"
    assert told == []


def test_a_target_without_a_template_continues_the_text(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "base", has_chat_template=False)
    base = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    assert base.tokenizer is not None
    assert encode_turn(base, TALK) == tuple(base.tokenizer.encode("Hello"))
    assert encode_turn(base, TALK, [" you"]) == tuple(base.tokenizer.encode("Hello you\n\nAgain"))


@pytest.mark.parametrize("options", [OPTIONS, DecodeOptions(max_tokens=6, temperature=1.0)])
def test_a_head_changes_no_answer_however_many_are_in_flight(
    target: Target, plain: Engine, questions: tuple[Question, ...], options: DecodeOptions
) -> None:
    alone = answer_questions(plain, questions, options)
    crowd = DecodeOptions(max_tokens=6, temperature=options.temperature, concurrency=3)
    drafted = answer_questions(Engine(target, tiny_head(target), SETTINGS), questions, crowd)
    assert [one.token_ids for one in drafted.answers] == [one.token_ids for one in alone.answers]
    assert alone.figures.accept_length == 1.0
    assert sum(one.offered_at_depth[0] for one in drafted.answers) > 0
    assert Measured.from_json(drafted.to_json()) == drafted
    again = answer_questions(plain, questions, options, repeat=1)
    is_sampled = options.temperature > 0
    assert (
        [one.text for one in again.answers] != [one.text for one in alone.answers]
    ) == is_sampled


def test_seconds_are_those_of_the_clock(plain: Engine, questions: tuple[Question, ...]) -> None:
    measured = answer_questions(
        plain, questions[:2], OPTIONS, clock=lambda engine: engine.stats.num_passes
    )
    assert [one.seconds for one in measured.answers] == [one.num_tokens for one in measured.answers]
    assert all(one.first_token_s == 1 for one in measured.answers)
    assert measured.seconds == measured.num_tokens
    assert measured.figures.tokens_per_s == 1.0


def test_a_request_that_cannot_be_served_fails_alone(
    plain: Engine, questions: tuple[Question, ...]
) -> None:
    long = Question(prompt=SHORT, turn=0, token_ids=(1,) * 600)
    measured = answer_questions(plain, [long, questions[3]], OPTIONS)
    assert "the prompt has 600 tokens" in str(measured.answers[0].error)
    figures = measured.figures
    assert (figures.num_answers, figures.num_failed) == (1, 1)
    assert figures.num_tokens == measured.answers[1].num_tokens


def test_prompts_without_room_for_an_answer_are_left_out(questions: tuple[Question, ...]) -> None:
    longest = max(len(one.token_ids) for one in questions)
    fitting, num_left_out = refuse_long(questions, context_len=longest, max_tokens=1)
    assert (len(fitting), num_left_out) == (3, 1)
    with pytest.raises(MeasurementError, match=r"no prompt fits: the shortest has \d+ tokens"):
        refuse_long(questions, context_len=10, max_tokens=8)


def test_figures_before_loops_leave_the_easy_part_out() -> None:
    looping = Answer(
        question="a",
        task="t",
        num_prompt_tokens=3,
        token_ids=tuple(range(41)),
        cycles=10,
        seconds=5.0,
        offered_at_depth=(10, 8),
        accepted_at_depth=(8, 8),
        loop_start=12,
        tokens_before_loop=11,
        cycles_before_loop=5,
    )
    found = summarise(
        [looping, Answer(question="b", task="t", num_prompt_tokens=1, error="x")], seconds=5.0
    )
    assert (found.accept_length, found.accept_length_before_loops) == (4.0, 2.0)
    assert found.acceptance_at_depth == (0.8, 1.0)
    assert found.looping_share == pytest.approx(30 / 41)
    assert (found.num_looping, found.tokens_per_s) == (1, 41 / 5)
    nothing = summarise([], seconds=0.0)
    assert (nothing.accept_length, nothing.tokens_per_s, nothing.looping_share) == (None, None, 0.0)
