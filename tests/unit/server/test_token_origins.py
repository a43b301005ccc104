"""Which tokens were drafted, from the engine to what a client reads."""

import json
import queue
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams
from fledge.models.tokenizer import TargetTokenizer
from fledge.server.chat_shape import ChatShape
from fledge.server.engine_loop import EngineLoop
from fledge.server.message_parts import MessageSplitter
from fledge.server.shapes import ChoiceState, CompletionShape, ShapeOptions
from fledge.server.token_text import TokenText
from fledge.server.wire import Finish, Order, Piece, Report, Submit, TokenOrigin
from fledge.testing import ScriptedDrafter, target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.unit.server.made_up import STATS

PROMPT = (70, 71, 72)
TOKENIZER = TargetTokenizer(tiny_tokenizer())
OPTIONS = ShapeOptions(
    model="tiny",
    has_logprobs=False,
    has_token_ids=False,
    has_usage=False,
    has_usage_always=False,
    num_choices=1,
    has_origins=True,
)


def tiny_target() -> Any:
    return target_of(tiny_model(vocab_size=len(tiny_tokenizer()), eos_token_id=None), TOKENIZER)


def served(engine: Engine, **params: Any) -> list[Piece]:
    """The pieces of one answer, as the engine's side of the server makes them."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    reports: list[Report] = []
    loop = EngineLoop(engine, orders, reports.append)
    orders.put(Submit(1, PROMPT, SamplingParams(max_tokens=40, **params), "client"))
    for _ in range(60):
        loop.turn()
        pieces = [event for report in reports for event in report.events]
        if pieces and pieces[-1].finish is not None:
            return pieces
    pytest.fail("60 turns were not enough")


def test_depths_say_what_the_drafter_got_right() -> None:
    target = tiny_target()
    (plain,) = Engine(target).generate([PROMPT], SamplingParams(max_tokens=40))
    drafter = ScriptedDrafter(
        {PROMPT: plain.token_ids}, vocab_size=target.vocab_size, accuracy=1.0, depth=3
    )
    engine = Engine(target, drafter=drafter, settings=EngineSettings(cache_tokens=512))
    params = SamplingParams(max_tokens=40, draft_depths=True)
    (drafted,) = engine.generate([PROMPT], params)
    assert drafted.token_ids == plain.token_ids
    # The prompt's own token, then three drafts and one of the target in every cycle.
    assert drafted.draft_depths == ((0,) + (1, 2, 3, 0) * 10)[:40]
    pieces = served(engine, draft_depths=True)
    origins = [one for piece in pieces for one in piece.origins or ()]
    assert tuple(one.draft_depth for one in origins) == drafted.draft_depths
    assert "".join(one.text for one in origins) == plain.text
    assert all("".join(one.text for one in piece.origins or ()) == piece.text for piece in pieces)
    assert plain.draft_depths is None
    assert all(piece.origins is None for piece in served(engine)), "nothing unless asked for"


def test_a_request_may_do_without_drafts_beside_one_that_does_not() -> None:
    target = tiny_target()
    engine = Engine(target, tiny_head(target), EngineSettings(cache_tokens=512))
    asked = [SamplingParams(max_tokens=20, speculate=speculate) for speculate in (True, False)]
    together = engine.generate([PROMPT, PROMPT], asked)
    alone = engine.generate([PROMPT], asked[1])
    assert together[0].token_ids == together[1].token_ids == alone[0].token_ids
    assert together[0].stats.offered_at_depth
    for completion in (together[1], alone[0]):
        assert completion.stats.offered_at_depth == ()
        assert completion.stats.cycles == 19
    engine.check_integrity()


def texts_of(text: str, *, stop: tuple[str, ...] = (), **params: Any) -> tuple[str, list[str]]:
    """What is shown of a text, piece by piece, when the target is made to say it byte by byte."""
    engine = Engine(tiny_target(), settings=EngineSettings(cache_tokens=512))
    ids = TOKENIZER.encode_all([text])[0]
    request = engine.make_request(
        PROMPT, SamplingParams(max_tokens=len(ids), stop=stop, draft_depths=True, **params)
    )
    seq = engine.add(request)
    shown, texts = "", []
    for number, token_id in enumerate(ids):
        if seq.is_finished:
            break
        seq.commit([token_id], now=0.0)
        fresh = seq.take_new_text()
        shown += fresh
        texts += seq.token_texts(number, fresh)
    engine.abort([seq])
    return shown, texts


def test_the_last_part_of_a_character_has_all_of_it() -> None:
    assert texts_of("aü🦅b") == ("aü🦅b", ["a", "", "ü", "", "", "", "🦅", "b"])
    shown, texts = texts_of("a🦅"[:1] + "🦅", min_tokens=0)
    assert (shown, "".join(texts)) == ("a🦅", "a🦅")


def test_what_might_be_a_stop_text_comes_with_the_token_that_settles_it() -> None:
    assert texts_of("one ENd", stop=("END",)) == ("one ENd", ["o", "n", "e", " ", "", "", "ENd"])
    assert texts_of("one END.", stop=("END",)) == ("one ", ["o", "n", "e", " ", "", "", ""])


def origins(*texts: str) -> tuple[TokenOrigin, ...]:
    return tuple(TokenOrigin(text, depth) for depth, text in enumerate(texts))


def piece_of(one: tuple[TokenOrigin, ...], *, is_last: bool = False) -> Piece:
    text = "".join(origin.text for origin in one)
    ids = tuple(range(70, 70 + len(one)))
    return Piece(0, text, ids, None, Finish("stop", STATS) if is_last else None, one)


def thinking() -> MessageSplitter:
    return MessageSplitter(can_think=True, is_thinking=True, calls=None)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_chat_tells_tokens_of_reasoning_and_content(is_stream: bool) -> None:
    pieces = [
        piece_of(origins("h", "m", "</th")),
        piece_of(origins("ink>", "A", "ns<", "wer"), is_last=True),
    ]
    state = ChoiceState((1, 2))
    shape = ChatShape(OPTIONS, TokenText(TOKENIZER), thinking, is_stream=is_stream)
    tokens = []
    for piece in pieces:
        state.take(piece)
        if is_stream:
            event = json.loads(shape.chunk(0, piece, [state]).removeprefix(b"data: "))
            tokens += event["choices"][0]["tokens"]
    if not is_stream:
        tokens = shape.whole([state])["choices"][0]["tokens"]
    assert [token["draft_depth"] for token in tokens] == [0, 1, 2, 0, 1, 2, 3]
    assert [token["text"] for token in tokens] == ["", "", "", "", "A", "ns<", "wer"]
    assert [token.get("reasoning", "") for token in tokens] == ["h", "m", "", "", "", "", ""]


def test_a_completion_tells_tokens() -> None:
    state = ChoiceState((1, 2))
    shape = CompletionShape(OPTIONS, TokenText(TOKENIZER))
    piece = piece_of(origins("a", "b"), is_last=True)
    state.take(piece)
    expected = [{"text": "a", "draft_depth": 0}, {"text": "b", "draft_depth": 1}]
    event = json.loads(shape.chunk(0, piece, [state]).removeprefix(b"data: "))
    assert event["choices"][0]["tokens"] == expected
    assert shape.whole([state])["choices"][0]["tokens"] == expected
