"""In this process: the answers of the engine, token for token, however they were batched."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings
from fledge.data.regenerate.in_process import EngineAnswerer
from fledge.data.regenerate.journal import JOURNAL_NAME
from fledge.data.regenerate.stage import regenerate
from fledge.engine.engine import Engine
from fledge.models.target import Target
from fledge.store.manifest import Manifest, read_manifest
from fledge.store.row_hash import conversation_hash
from fledge.store.rows import read_rows
from fledge.testing import save_tiny_target, target_of, tiny_model
from tests.unit.data.regenerate_support import make_source, output_bytes, row, say, simple_rows


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")
    return Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))


def answer(source: Path, out: Path, target: Target, **options: Any) -> Manifest:
    settings = RegenerateSettings(**{"max_tokens": 12, **options})
    engine = Engine(target, settings=EngineSettings(max_requests=3))
    answerer = EngineAnswerer(engine, "tiny", settings)
    manifest = regenerate(source, out, settings, answerer, progress=SilentProgress())
    assert not engine.has_work
    return manifest


def two_turns(count: int) -> list[Any]:
    return [
        row(
            n,
            say("user", f"q{n}"),
            say("assistant", "old"),
            say("user", f"and {n}?"),
            say("assistant", "old"),
        )
        for n in range(1, count + 1)
    ]


def test_answers_are_the_engines_own(target: Target, tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", two_turns(8))
    manifest = answer(source, tmp_path / "out", target, turns="all")
    assert manifest.plan.identity["model"] == "tiny"
    assert manifest.plan.identity["tokenizer"]["sha256"]
    assert manifest.counts["answers"] >= 8
    engine = Engine(target)
    for one in read_rows(tmp_path / "out"):
        for given in one.answers:
            params = SamplingParams(max_tokens=12, temperature=given.temperature, seed=given.seed)
            (alone,) = engine.generate([list(one.messages[: given.message])], params)
            assert given.token_ids == alone.token_ids
            assert given.finish_reason == alone.finish_reason
            assert one.messages[given.message]["content"] == alone.text
    assert {one.temperature for row in read_rows(tmp_path / "out") for one in row.answers} == {
        0.0,
        0.7,
        1.0,
    }


def test_a_resumed_run_says_the_same(target: Target, tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(12))
    calm = answer(source, tmp_path / "calm", target)
    out = tmp_path / "out"

    class Died(Exception):
        pass

    num_steps = 0
    real = Engine.step

    def dying(engine: Engine) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 17 == 0:
            raise Died
        real(engine)

    num_runs = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", dying)
        while not (out / "manifest.json").exists():
            num_runs += 1
            try:
                answer(source, out, target)
            except Died:
                assert (out / JOURNAL_NAME).exists()
    assert num_runs > 2
    assert read_manifest(out).fingerprint == calm.fingerprint
    assert output_bytes(out) == output_bytes(tmp_path / "calm")


def test_rows_asked_several_times_get_every_temperature(target: Target, tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(3))
    once = answer(source, tmp_path / "once", target, temperatures=(0.0, 1.0))
    twice = answer(source, tmp_path / "twice", target, temperatures=(0.0, 1.0), answers=2)
    assert (once.counts["rows"], twice.counts["rows"]) == (3, 6)
    first, rows = list(read_rows(tmp_path / "once")), list(read_rows(tmp_path / "twice"))
    assert rows[:3] == first
    for one, other in zip(rows[:3], rows[3:], strict=True):
        assert other.id == f"{one.id}~2"
        assert {one.answers[0].temperature, other.answers[0].temperature} == {0.0, 1.0}
        assert conversation_hash(other.id) == conversation_hash(one.id)


def test_a_source_may_have_temperatures_of_its_own(target: Target, tmp_path: Path) -> None:
    rows = simple_rows(3)
    rows[1] = replace(rows[1], id="sums/2", origin=replace(rows[1].origin, source="sums"))
    source = make_source(tmp_path / "c", rows)
    own = {"sums": (0.0, 0.3, 0.6)}
    made = answer(source, tmp_path / "a", target, temperatures=(1.0,), source_temperatures=own)
    assert made.counts["rows"] == 5
    found = {row.id: row.answers[0].temperature for row in read_rows(tmp_path / "a")}
    assert found.keys() == {"chat/1", "sums/2", "chat/3", "sums/2~2", "sums/2~3"}
    assert {found[name] for name in found if "sums" in name} == {0.0, 0.3, 0.6}
    assert found["chat/1"] == found["chat/3"] == 1.0
    unknown = {"sum": (0.0,)}
    with pytest.raises(ConfigError, match="names 'sum', and the rows are of chat, sums"):
        answer(source, tmp_path / "b", target, source_temperatures=unknown)


def test_more_answers_than_temperatures_would_repeat_greedy_ones() -> None:
    with pytest.raises(ConfigError, match="answers is 3 and temperatures has 2, one of them 0"):
        RegenerateSettings(answers=3, temperatures=(0.0, 1.0))
    assert RegenerateSettings(answers=3, temperatures=(1.0,)).answers == 3


def test_prompts_that_do_not_fit_fail_alone(target: Target, tmp_path: Path) -> None:
    rows = [*simple_rows(3), row(4, say("user", "long " * 400))]
    manifest = answer(make_source(tmp_path / "c", rows), tmp_path / "out", target)
    assert (manifest.counts["rows"], manifest.counts["failed"]) == (3, 1)
    assert b"the target's context holds" in (tmp_path / "out" / "failed.jsonl").read_bytes()


def test_targets_without_a_template_continue_text(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "plain", has_chat_template=False)
    target = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    source = make_source(tmp_path / "c", [row(1, say("user", "once upon"))])
    with pytest.raises(ConfigError, match="tiny has no chat template, so it cannot read conv"):
        answer(source, tmp_path / "out", target)
    answer(source, tmp_path / "out", target, raw=True, temperatures=(0.0,))
    (one,) = read_rows(tmp_path / "out")
    assert target.tokenizer is not None
    prompt = target.tokenizer.encode("once upon")
    (alone,) = Engine(target).generate([prompt], SamplingParams(max_tokens=12))
    assert one.answers[0].token_ids == alone.token_ids


def test_a_target_without_a_tokenizer() -> None:
    engine = Engine(target_of(tiny_model()))
    with pytest.raises(ConfigError, match="the target x has no tokenizer"):
        EngineAnswerer(engine, "x", RegenerateSettings())


def test_the_cache_of_an_engine_can_be_bounded():
    bounded = RegenerateSettings(concurrency=3, cache_tokens=640).engine
    assert (bounded.max_requests, bounded.cache_tokens) == (3, 640)
    with pytest.raises(ConfigError, match=r"cache_tokens.*-1"):
        RegenerateSettings(cache_tokens=-1)
