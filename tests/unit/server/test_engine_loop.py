"""The engine's side of the server, turn by turn, around a real engine."""

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts.grammar import Grammar
from fledge.engine.grammar import GrammarCompiler
from fledge.models.tokenizer import TargetTokenizer
from fledge.server import grammar_lane
from fledge.server.engine_loop import EngineBrokenError, EngineLoop
from fledge.server.grammar_lane import prepare_grammars
from fledge.server.wire import Cancel, Order, Piece, Refusal, Report, Submit
from fledge.testing import target_of, tiny_model, tiny_tokenizer

PROMPT = (70, 71, 72)


class Bench:
    """A loop whose orders and reports lie open."""

    def __init__(self, **settings: Any) -> None:
        inner = tiny_tokenizer()
        target = target_of(
            tiny_model(vocab_size=len(inner), eos_token_id=None), TargetTokenizer(inner)
        )
        self.engine = Engine(target, settings=EngineSettings(cache_tokens=512, **settings))
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.reports: list[Report] = []
        self.loop = EngineLoop(self.engine, self.orders, self.reports.append)

    def submit(self, number: int, max_tokens: int = 8, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        self.orders.put(Submit(number, PROMPT, sampling, "client"))

    def turn_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200):
            if condition():
                return
            self.loop.turn()
        pytest.fail("200 turns were not enough")

    @property
    def events(self) -> list[Piece | Refusal]:
        return [event for report in self.reports for event in report.events]

    def is_finished(self, number: int) -> bool:
        return any(
            isinstance(event, Piece) and event.number == number and event.finish is not None
            for event in self.events
        )


def test_pieces_make_up_the_answer() -> None:
    bench = Bench()
    bench.submit(5)
    bench.submit(6, temperature=1.0, seed=3)
    bench.turn_until(lambda: bench.is_finished(5) and bench.is_finished(6))
    expected = bench.engine.generate(
        [PROMPT, PROMPT],
        [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=1.0, seed=3)],
    )
    for number, completion in zip((5, 6), expected, strict=True):
        pieces = [event for event in bench.events if event.number == number]
        assert "".join(piece.text for piece in pieces) == completion.text
        ids = tuple(token for piece in pieces for token in piece.token_ids)
        assert ids == completion.token_ids
    assert any(len(report.events) == 2 for report in bench.reports), "one message for each pass"
    stats = [report.stats for report in bench.reports if report.stats is not None]
    assert stats[-1].num_running == 0, "the last report shows an engine at rest"


def test_a_cancelled_request_is_gone_at_once() -> None:
    bench = Bench(max_requests=1)
    bench.submit(1, max_tokens=100)
    bench.submit(2, max_tokens=100)
    bench.turn_until(lambda: bool(bench.events))
    assert (bench.engine.stats.num_running, bench.engine.stats.num_waiting) == (1, 1)
    bench.orders.put(Cancel((1, 2, 99)))
    bench.loop.turn()
    assert (bench.engine.stats.num_running, bench.engine.stats.num_waiting) == (0, 0)
    bench.engine.check_integrity()
    stats = bench.reports[-1].stats
    assert stats is not None
    assert stats.cache_usage == 0


def test_what_cannot_be_served_is_refused() -> None:
    bench = Bench()
    bench.orders.put(Submit(1, (), SamplingParams(), "client"))
    bench.orders.put(Submit(2, (99999,), SamplingParams(), "client"))
    bench.orders.put(Submit(3, ("a",), SamplingParams(), "client"))
    bench.loop.turn()
    assert [(event.number, event.is_clients_fault) for event in bench.events] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    assert "the prompt is empty" in bench.events[0].message


def test_a_failed_pass_drops_its_requests_and_three_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    bench.submit(1)
    bench.loop.turn()
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._verifier, "run", fail)
        bench.loop.turn()
    refusal = bench.events[-1]
    assert isinstance(refusal, Refusal)
    assert "the request was dropped" in refusal.message
    assert not refusal.is_clients_fault
    bench.submit(2, max_tokens=2)
    bench.turn_until(lambda: bench.is_finished(2))
    monkeypatch.setattr(bench.engine._verifier, "run", fail)
    for number in (3, 4):
        bench.submit(number)
        bench.loop.turn()
    bench.submit(5)
    with pytest.raises(EngineBrokenError, match="no such kernel"):
        bench.loop.turn()
    assert [event.number for event in bench.events[-3:]] == [3, 4, 5]


def test_a_dead_device_ends_the_engine_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.submit(1)
    bench.loop.turn()
    monkeypatch.setattr(bench.engine._verifier, "run", fail)
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(EngineBrokenError, match="illegal memory access"):
        bench.loop.turn()


YES_OR_NO = Grammar(kind="regex", text="yes|no", source="guided_regex")


def test_answers_with_a_grammar() -> None:
    bench = Bench()
    prepare_grammars(bench.engine)
    bench.submit(1, grammar=YES_OR_NO)
    bench.submit(2, grammar=YES_OR_NO, temperature=1.0)
    bench.turn_until(lambda: bench.is_finished(1) and bench.is_finished(2))
    texts = {
        number: "".join(one.text for one in bench.events if one.number == number)
        for number in (1, 2)
    }
    assert set(texts.values()) <= {"yes", "no"}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars are not compiled before this is set."""
    gate = threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_later(self: GrammarCompiler, grammar: Grammar) -> Any:
        gate.wait(60)
        return compile_now(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    yield gate
    gate.set()


def test_nobody_waits_for_a_grammar(held: threading.Event) -> None:
    bench = Bench()
    bench.submit(1, grammar=YES_OR_NO)
    bench.submit(2)
    bench.turn_until(lambda: bench.is_finished(2))
    assert not bench.is_finished(1)
    held.set()
    bench.turn_until(lambda: bench.is_finished(1))


def test_grammar_of_a_client_that_left(held: threading.Event) -> None:
    bench = Bench()
    bench.submit(1, grammar=YES_OR_NO)
    bench.orders.put(Cancel((1,)))
    bench.submit(2)
    bench.turn_until(lambda: bench.is_finished(2))
    held.set()
    bench.submit(3, grammar=YES_OR_NO)
    bench.turn_until(lambda: bench.is_finished(3))
    assert not any(event.number == 1 for event in bench.events)


def test_grammar_that_takes_too_long(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_lane, "COMPILE_S", 0.0)
    bench = Bench()
    bench.submit(1, grammar=YES_OR_NO)
    bench.turn_until(lambda: bool(bench.events))
    (refusal,) = bench.events
    assert isinstance(refusal, Refusal)
    assert refusal.is_clients_fault
    assert refusal.param == "guided_regex"
    assert "was not compiled within 0 s" in refusal.message


def test_wrong_grammar_names_its_parameter() -> None:
    bench = Bench()
    bench.submit(1, grammar=Grammar(kind="regex", text="(a", source="guided_regex"))
    bench.turn_until(lambda: bool(bench.events))
    (refusal,) = bench.events
    assert isinstance(refusal, Refusal)
    assert (refusal.is_clients_fault, refusal.param) == (True, "guided_regex")
    assert "unclosed group" in refusal.message


def test_vocabulary_that_cannot_be_prepared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody else is served."""
    bench = Bench()
    monkeypatch.setattr(TargetTokenizer, "backend_json", lambda self: "{")
    prepare_grammars(bench.engine)
    assert "answers cannot have grammars" in caplog.text
    bench.submit(1, grammar=YES_OR_NO)
    bench.submit(2)
    bench.turn_until(lambda: bench.is_finished(2) and any(e.number == 1 for e in bench.events))


def test_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bench = Bench()
    prepare_grammars(bench.engine)
    bench.submit(1, grammar=YES_OR_NO)
    bench.turn_until(lambda: bool(bench.events))
    (refusal,) = bench.events
    assert isinstance(refusal, Refusal)
    assert "pip install 'fledge[serve]'" in refusal.message
