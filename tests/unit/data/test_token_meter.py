"""What a target has said is told before any row is finished."""

from typing import Any

from fledge.contracts.sampling import SamplingParams
from fledge.data.token_meter import Question, TokenMeter, answer_batches
from fledge.engine.engine import Engine
from fledge.engine.sequence import Sequence
from fledge.testing import target_of, tiny_model

PROMPTS = [[5, 6, 7], [8, 9]]


class Labels:
    """A task that remembers its labels."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def advance(self, amount: int) -> None: ...

    def update_total(self, total: int) -> None: ...

    def update_label(self, label: str) -> None:
        self.labels.append(label)


def test_tokens_are_counted_between_cycles() -> None:
    engine = Engine(target_of(tiny_model()))
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 6)]
    task = Labels()
    said = TokenMeter(task, "asking", every_s=0.0)
    batches = [list(zip(PROMPTS, params, strict=True))]
    (answers,) = answer_batches(engine, batches, lambda _: True, said)
    expected = [answer.token_ids for answer in engine.generate(PROMPTS, params)]
    assert [answer.token_ids for answer in answers] == expected
    counts = [int(label.removeprefix("asking, ").removesuffix(" tokens")) for label in task.labels]
    assert counts == sorted(counts)
    assert (counts[0] < 9, counts[-1]) == (True, 9)
    list(answer_batches(engine, batches, lambda _: True, said))
    assert task.labels[-1] == "asking, 18 tokens"


def test_it_looks_now_and_then() -> None:
    task = Labels()
    said = TokenMeter(task, "asking", every_s=3600.0)
    said.look([])
    TokenMeter(None, "asking", every_s=0.0).look([])
    assert not task.labels


class WatchedEngine(Engine):
    """Remembers how many answers were under way in each cycle."""

    def __init__(self) -> None:
        super().__init__(target_of(tiny_model()))
        self.asked: list[Sequence] = []
        self.under_way: list[int] = []

    def add(self, request: Any, **more: Any) -> Sequence:
        self.asked.append(super().add(request, **more))
        return self.asked[-1]

    def step(self) -> Any:
        self.under_way.append(sum(not seq.has_ended for seq in self.asked))
        return super().step()


def questions(*lengths: int) -> list[Question]:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    return [(PROMPTS[number % 2], one) for number, one in enumerate(params)]


BATCHES = [questions(2, 12), questions(3, 4), questions(5, 2)]


def test_the_next_batch_does_not_wait_for_the_last_answers() -> None:
    engine, said = WatchedEngine(), TokenMeter(None, "")
    found = list(answer_batches(engine, BATCHES, lambda _: True, said))
    plain = Engine(target_of(tiny_model()))
    expected = [plain.generate(*map(list, zip(*batch, strict=True))) for batch in BATCHES]
    assert [[one.token_ids for one in batch] for batch in found] == [
        [one.token_ids for one in batch] for batch in expected
    ]
    assert max(engine.under_way) == 4


def test_nothing_is_asked_ahead_that_is_not_wanted() -> None:
    engine, asked_of = WatchedEngine(), list[int]()
    wanted = answer_batches(
        engine, BATCHES, lambda count: bool(asked_of.append(count)), TokenMeter(None, "")
    )
    assert len(list(wanted)) == 3
    assert max(engine.under_way) == 2
    assert set(asked_of) == {2}


def test_what_was_asked_ahead_is_taken_back() -> None:
    engine = WatchedEngine()
    answers = answer_batches(engine, BATCHES, lambda _: True, TokenMeter(None, ""))
    next(answers)
    answers.close()
    assert len(engine.asked) == 4
    assert all(seq.has_ended for seq in engine.asked)
    assert not engine.step()
