"""What a target has said is told before any row is finished."""

from fledge.contracts.sampling import SamplingParams
from fledge.data.token_meter import TokenMeter, answer_watched
from fledge.engine.engine import Engine
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
    answers = answer_watched(engine, PROMPTS, params, said)
    expected = [answer.token_ids for answer in engine.generate(PROMPTS, params)]
    assert [answer.token_ids for answer in answers] == expected
    counts = [int(label.removeprefix("asking, ").removesuffix(" tokens")) for label in task.labels]
    assert counts == sorted(counts)
    assert (counts[0] < 9, counts[-1]) == (True, 9)
    answer_watched(engine, PROMPTS, params, said)
    assert task.labels[-1] == "asking, 18 tokens"


def test_it_looks_now_and_then() -> None:
    task = Labels()
    said = TokenMeter(task, "asking", every_s=3600.0)
    said.look([])
    TokenMeter(None, "asking", every_s=0.0).look([])
    assert not task.labels
