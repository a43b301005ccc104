"""Chats and completions as they are written, read back by the client's own types."""

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fledge.contracts.outputs import TokenLogprobs
from fledge.models.tokenizer import TargetTokenizer
from fledge.server.chat_shape import ChatShape
from fledge.server.message_parts import MessageSplitter
from fledge.server.shapes import ChoiceState, CompletionShape, Shape, ShapeOptions
from fledge.server.token_text import TokenText
from fledge.server.wire import Finish, Piece
from fledge.testing import tiny_tokenizer
from tests.unit.server.made_up import STATS

TEXT = TokenText(TargetTokenizer(tiny_tokenizer()))
CALL = 'Wait.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
END = Finish("stop", STATS)


def options(**changed: Any) -> ShapeOptions:
    usual = {
        "model": 'm "@"',
        "has_logprobs": False,
        "has_token_ids": False,
        "has_usage": False,
        "has_usage_always": False,
        "num_choices": 1,
    }
    return ShapeOptions(**{**usual, **changed})


def thinking_splitter() -> MessageSplitter:
    return MessageSplitter(can_think=True, is_thinking=True, calls="hermes", tool_names=("add",))


def chunks(shape: Shape, texts: list[str], index: int = 0, choices: Any = None) -> list[Any]:
    choices = choices or [ChoiceState((1, 2))]
    found = []
    for number, text in enumerate(texts, start=1):
        logprobs = (TokenLogprobs(token_id=70, logprob=-1.0, top=((71, -0.5),)),)
        piece = Piece(index, text, (70,), logprobs, END if number == len(texts) else None)
        choices[index].take(piece)
        if event := shape.chunk(index, piece, choices):
            assert event.startswith(b"data: ")
            assert event.endswith(b"\n\n")
            found.append(json.loads(event.removeprefix(b"data: ")))
    return found


def test_a_message_with_reasoning_and_a_call() -> None:
    state = ChoiceState((1, 2))
    state.take(Piece(0, "hm</think>" + CALL, (70,), None, END))
    shape = ChatShape(options(), TEXT, thinking_splitter, is_stream=False)
    answer = ChatCompletion.model_validate(shape.whole([state]))
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Wait.", "hm")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("portion", [1, 5, 100])
def test_a_stream_with_reasoning_and_calls(portion: int) -> None:
    text = "hm</think>" + CALL + CALL.removeprefix("Wait.\n")
    texts = [text[start : start + portion] for start in range(0, len(text), portion)]
    shape = ChatShape(options(), TEXT, thinking_splitter, is_stream=True)
    found = [ChatCompletionChunk.model_validate(one) for one in chunks(shape, texts)]
    deltas = [one.choices[0].delta for one in found]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Wait."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    named = [(call.index, call.function.name) for call in calls if call.id is not None]
    assert named == [(0, "add"), (1, "add")]
    for index in (0, 1):
        pieces = [call.function.arguments for call in calls if call.index == index]
        assert json.loads("".join(pieces)) == {"a": 1}
    assert found[-1].choices[0].finish_reason == "tool_calls"


def test_plain_chunks_of_several_choices() -> None:
    choices = [ChoiceState((1, 2)), ChoiceState((1, 2))]
    shape = ChatShape(options(num_choices=2, has_usage=True), TEXT, None, is_stream=True)
    texts = ["a", 'b "@"', "ü\n", ""]
    for index in (1, 0):
        found = chunks(shape, texts, index, choices)
        assert [one["choices"][0]["delta"].get("content", "") for one in found] == texts
        assert {one["choices"][0]["index"] for one in found} == {index}
        assert {one["model"] for one in found} == {'m "@"'}
        assert all(one["usage"] is None for one in found)
        assert "fledge" in found[-1]
    last = shape.last_chunk(choices)
    assert last is not None
    assert json.loads(last.removeprefix(b"data: "))["usage"]["prompt_tokens"] == 2


def test_chunks_with_everything() -> None:
    everything = options(
        has_logprobs=True, has_token_ids=True, has_usage=True, has_usage_always=True
    )
    found = chunks(ChatShape(everything, TEXT, None, is_stream=True), ["a", "b"])
    assert [one["usage"]["completion_tokens"] for one in found] == [1, 2]
    assert ["prompt_token_ids" in one["choices"][0] for one in found] == [True, False]
    assert found[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -0.5


def test_completions() -> None:
    shape = CompletionShape(options(has_logprobs=True), TEXT)
    first, second = chunks(shape, ["ab", "c"])
    assert (first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == ("ab", None)
    logprobs = Completion.model_validate(second).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [2]
    assert logprobs.top_logprobs is not None
    assert sorted(logprobs.top_logprobs[0].values()) == [-1.0, -0.5]
    plain = chunks(CompletionShape(options(), TEXT), ["ab", "c"])
    assert [one["choices"][0]["text"] for one in plain] == ["ab", "c"]
