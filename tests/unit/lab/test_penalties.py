"""A target that asks for a repetition penalty gets it, unless a verb's settings say otherwise."""

import json
from pathlib import Path

import pytest
import torch

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import EngineSettings
from fledge.contracts.tune_settings import TuneSettings
from fledge.data.regenerate.chat_api import body_of
from fledge.data.regenerate.dialogue import Question as Asked
from fledge.data.regenerate.in_process import EngineAnswerer
from fledge.data.regenerate.stage import regenerate
from fledge.engine.engine import Engine
from fledge.lab.arms import decode_options
from fledge.lab.bench_arms import query_of
from fledge.lab.load_engine import EngineDriver
from fledge.lab.load_point import Point
from fledge.lab.load_prompts import LoadPrompt
from fledge.lab.measure import answer_questions
from fledge.lab.questions import make_questions
from fledge.lab.suite_prompts import Prompt
from fledge.models.target import Target
from fledge.store.rows import read_rows
from fledge.testing import save_tiny_target
from tests.unit.data.regenerate_support import make_source, simple_rows

PENALTY = 1.7
PROMPT = LoadPrompt(({"role": "user", "content": "Hi"},), "Hi")
ASKED = {None: PENALTY, 1.0: 1.0, 1.05: 1.05}
"""What a verb is told, and what then holds."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")
    place = directory / "generation_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"repetition_penalty": PENALTY}))
    target = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    return Engine(target, None, EngineSettings(max_requests=2, share_prefixes=False))


def say(engine: Engine, token_ids: tuple[int, ...], penalty: float) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=12, repetition_penalty=penalty)
    return engine.generate([token_ids], params)[0].token_ids


def test_penalties_change_what_this_target_says(engine: Engine) -> None:
    answers = {say(engine, (5, 6, 7), penalty) for penalty in ASKED.values()}
    assert len(answers) == len(ASKED), "or the tests below would show nothing"


@pytest.mark.parametrize("told", ASKED)
def test_select_and_tune(engine: Engine, told: float | None) -> None:
    questions = make_questions(engine.target, [Prompt(id="1", task="t", turns=("Hi",))], {})
    select = SelectSettings(max_tokens=12, repetition_penalty=told)
    tune = TuneSettings(max_tokens=12, repetition_penalty=told)
    for settings in (select, tune.measuring()):
        measured = answer_questions(engine, questions, decode_options(settings))
        expected = say(engine, questions[0].token_ids, ASKED[told])
        assert measured.answers[0].token_ids == expected


@pytest.mark.parametrize("told", ASKED)
def test_regenerate(engine: Engine, told: float | None, tmp_path: Path) -> None:
    settings = RegenerateSettings(max_tokens=12, temperatures=(0.0,), repetition_penalty=told)
    source = make_source(tmp_path / "c", simple_rows(1))
    answerer = EngineAnswerer(engine, "tiny", settings)
    regenerate(source, tmp_path / "out", settings, answerer, progress=SilentProgress())
    (row,) = read_rows(tmp_path / "out")
    assert engine.target.tokenizer is not None
    asked = engine.target.tokenizer.encode_chat(row.messages[:-1])
    assert row.answers[0].token_ids == say(engine, tuple(asked), ASKED[told])


@pytest.mark.parametrize("told", ASKED)
def test_bench(engine: Engine, told: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda one: requests.append(one) or add(one))
    driver = EngineDriver(engine, BenchSettings(repetition_penalty=told))
    driver.drive(Point("closed", 1), [PROMPT], max_tokens=2, seed=0, on_answer=lambda: None)
    assert requests[0].params.repetition_penalty == ASKED[told]


@pytest.mark.parametrize("told", ASKED)
def test_requests_over_http_name_it_only_when_told(told: float | None) -> None:
    query = query_of(BenchSettings(repetition_penalty=told))
    bench = json.loads(query.body(PROMPT, 4))
    question = Asked(
        row=0,
        turn=0,
        messages=({"role": "user", "content": "Hi"},),
        tools=(),
        temperature=0.0,
        seed=1,
    )
    again = body_of(question, RegenerateSettings(repetition_penalty=told), "tiny")
    assert [body.get("repetition_penalty") for body in (bench, again)] == [told, told]
