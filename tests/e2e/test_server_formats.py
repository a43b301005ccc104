"""Structured answers, tool calls and reasoning with the real openai client, under drafts.

The target is random and its marks are special tokens. What it says is steered by grammars: a
client's own grammar makes it say exactly what a test wants to see taken apart.
"""

import asyncio
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict

from fledge import EngineSettings, TreeSettings
from fledge.models.head_files import save_head
from fledge.models.target import Target
from fledge.server.api_requests import ChatRequest, CompletionRequest
from fledge.testing import tiny_head, tiny_model, tiny_tokenizer
from tests.e2e.server_support import MODEL, RunningServer, running_server

SETTINGS = EngineSettings(
    tree=TreeSettings(depth=3, width=3, budget=8), controller="fixed", max_requests=4
)
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "qwen3.jinja"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PICK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sky: Literal["clear", "grey"]
    is_warm: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    directory, head = (tmp_path_factory.mktemp(name) / "x" for name in ("target", "head"))
    tiny_model("llama", vocab_size=len(tokenizer) + 5).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    target = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    save_head(tiny_head(target, draft_vocab_size=len(tokenizer)), head)
    cache = tmp_path_factory.mktemp("cache")
    with running_server(directory, head, cache=cache, engine=SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def ids(server: RunningServer) -> dict[str, int]:
    """Token ids of the marks."""
    return {mark: server.post("/tokenize", {"prompt": mark}).json()["tokens"][-1] for mark in MARKS}


@pytest.fixture(scope="module")
def bias(server: RunningServer, ids: dict[str, int]) -> dict[str, int]:
    """Against white space and reasoning, so that random answers come to their end."""
    spaces = server.post("/tokenize", {"prompt": " \n\t\r"}).json()["tokens"]
    return {str(token_id): -100 for token_id in [*spaces, ids["<think>"]]}


def spoken(text: str, ids: dict[str, int]) -> dict[str, Any]:
    """A grammar that allows this answer only."""
    rule = json.dumps(text)
    for mark, token_id in ids.items():
        rule = rule.replace(mark, f'" <[{token_id}]> "')
    return {"guided_grammar": f"start: {rule}".replace('""', "").strip()}


def test_parsed_into_a_model(server: RunningServer, bias: dict[str, int]) -> None:
    answer = server.openai.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        response_format=Weather,
        seed=1,
        max_completion_tokens=80,
        logit_bias=bias,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Weather)
    assert answer.choices[0].finish_reason == "stop"


def test_streams_of_structured_answers(server: RunningServer, bias: dict[str, int]) -> None:
    """Several at once, beside streams without a form; the text is the same without drafts."""
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}

    async def ask(client: openai.AsyncOpenAI, seed: int, **fields: Any) -> str:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            seed=seed,
            stream=True,
            logit_bias=bias,
            **{"max_tokens": 80, **fields},
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all(**fields: Any) -> list[str]:
        form = {"type": "json_schema", "json_schema": schema}
        async with server.async_openai() as client:
            return await asyncio.gather(
                ask(client, 1, response_format=form, temperature=0, **fields),
                ask(client, 2, max_tokens=16, **fields),
                ask(client, 3, response_format=form, **fields),
                ask(client, 4, max_tokens=16, response_format={"type": "json_object"}, **fields),
            )

    drafted = asyncio.run(ask_all())
    plain = asyncio.run(ask_all(extra_body={"speculation": False}))
    assert drafted == plain
    for text in (drafted[0], drafted[2]):
        Weather.model_validate_json(text)
    assert drafted[3].startswith("{")


def test_forced_call(server: RunningServer, bias: dict[str, int]) -> None:
    answer = server.openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[PICK],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
        max_tokens=120,
        logit_bias=bias,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert choice.message.content is None


def test_named_call_in_a_stream(server: RunningServer, bias: dict[str, int]) -> None:
    stream = server.openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[PICK, STOP],
        tool_choice={"type": "function", "function": {"name": "pick"}},
        stream=True,
        seed=3,
        max_tokens=120,
        logit_bias=bias,
    )
    chunks = [chunk.choices[0] for chunk in stream]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.id] == ["pick"]
    assert {piece.index for piece in pieces} == {0}
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    assert json.loads(arguments)["colour"] in ("red", "blue")
    assert len(pieces) > 3, "arguments come while they are written"
    assert chunks[-1].finish_reason == "tool_calls"


SAID = (
    "<think>\nHm\n</think>\n\nOk\n"
    '<tool_call>\n{"name": "pick", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_marks_that_are_special_tokens(
    server: RunningServer, ids: dict[str, int], is_stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [PICK, STOP],
        "max_tokens": 250,
        "extra_body": spoken(SAID, ids),
    }
    if is_stream:
        with server.openai.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0]
    else:
        message = server.openai.chat.completions.create(**asked).choices[0]
    calls = [(one.function.name, one.function.arguments) for one in message.message.tool_calls]
    assert calls == [("pick", '{"a": 1}'), ("stop", "{}")]
    assert message.message.content == "Ok"
    assert message.message.reasoning_content == "Hm"
    assert message.finish_reason == "tool_calls"


def test_marks_without_tools_are_no_calls(server: RunningServer, ids: dict[str, int]) -> None:
    asked = {"model": MODEL, "messages": HELLO, **spoken("<tool_call>x</tool_call>", ids)}
    plain = server.post("/v1/chat/completions", asked).json()
    assert plain["choices"][0]["message"]["content"] == "x"
    shown = server.post("/v1/chat/completions", {**asked, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["message"]["content"] == "<tool_call>x</tool_call>"


def test_forms_of_completions(server: RunningServer) -> None:
    answer = server.openai.completions.create(
        model=MODEL,
        prompt=["One", "Two"],
        n=2,
        seed=1,
        logprobs=1,
        extra_body={"structured_outputs": {"choice": ["left", "right"]}},
    )
    assert {choice.text for choice in answer.choices} <= {"left", "right"}
    assert all(choice.finish_reason == "stop" for choice in answer.choices)
    best = answer.choices[0].logprobs.top_logprobs[0]
    assert min(best.values()) < max(best.values()), "logprobs are those without the form"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "strict": True,
                        "schema": {"type": "array", "uniqueItems": True},
                    },
                }
            },
            "response_format",
            "uniqueItems",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: other"}, "guided_grammar", "other"),
        ({"audio": {}}, "audio", "does not support audio"),
        ({"functions": []}, "functions", "give tools and tool_choice"),
        ({"web_search_options": {}}, "web_search_options", "does not support"),
        ({"logprobs": 3}, "logprobs", "logprobs"),
    ],
)
def test_refused(
    server: RunningServer, fields: dict[str, Any], param: str, words: str, is_stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        server.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=is_stream, extra_body=fields
        )
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["Go on", [70, 71, 72]], ids=["text", "ids"])
def test_echo(server: RunningServer, prompt: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0}
    bare = server.openai.completions.create(**asked).choices[0].text
    echoed = server.openai.completions.create(**asked, echo=True).choices[0].text
    stream = server.openai.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == echoed
    assert echoed.endswith(bare)
    assert len(echoed) > len(bare)
    if isinstance(prompt, str):
        assert echoed == prompt + bare


def test_every_parameter_of_the_client_is_known(server: RunningServer) -> None:
    """Taken or refused by name, none of them unheard of."""
    around = {"extra_headers", "extra_query", "extra_body", "timeout"}
    for method, model in (
        (server.openai.chat.completions.create, ChatRequest),
        (server.openai.completions.create, CompletionRequest),
    ):
        names = inspect.signature(method).parameters.keys() - around
        assert names <= model.model_fields.keys()


def test_every_parameter_at_once(server: RunningServer) -> None:
    """Parameters that are taken together, through the client, in a stream."""
    stream = server.openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        n=2,
        seed=5,
        stop=["zzz"],
        temperature=0.8,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"70": 1},
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        response_format={"type": "text"},
        tool_choice="none",
        tools=[PICK],
        parallel_tool_calls=True,
        reasoning_effort="low",
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
        prediction={"type": "content", "content": "x"},
        modalities=["text"],
    )
    *chunks, last = list(stream)
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}
    assert last.usage.completion_tokens <= 8
    tokens = [one for chunk in chunks for one in chunk.choices[0].logprobs.content]
    assert all(len(one.top_logprobs) == 2 for one in tokens)
