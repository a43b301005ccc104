"""The server with the real openai client: every answer is the engine's own, token for token."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.outputs import Completion
from fledge.testing import CHAT_TEMPLATE
from tests.e2e.conftest import RunProgram
from tests.e2e.server_support import MODEL, RunningServer, running_server
from tests.warm_programs import WarmPrograms

SETTINGS = EngineSettings(
    tree=TreeSettings(depth=3, width=3, budget=8), controller="fixed", max_requests=4
)
QUESTIONS = ["Hello", "Who are you?", "Name three rivers.", "Größe 🦅", "x" * 40]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def target(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a template that shows tools."""
    copy = tmp_path_factory.mktemp("targets") / "tools"
    copy.mkdir()
    for file in target_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}{% if shout %}!{% endif %}"
    (copy / "chat_template.jinja").write_text(tools + CHAT_TEMPLATE, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def server(
    target: Path, head_dir: Path, tmp_path_factory: pytest.TempPathFactory, warm: WarmPrograms
) -> Iterator[RunningServer]:
    cache = tmp_path_factory.mktemp("cache")
    with running_server(target, head_dir, cache=cache, engine=SETTINGS, warm=warm) as running:
        yield running


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    """The same target without a head, in this process."""
    return Engine.load(str(target), device="cpu")


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def reference(engine: Engine, text: str, **params: Any) -> Completion:
    (completion,) = engine.generate([chat(text)], SamplingParams(**params))
    return completion


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_chats_equal_the_engine(
    server: RunningServer, engine: Engine, sampling: dict[str, Any]
) -> None:
    for question in QUESTIONS:
        answer = server.openai.chat.completions.create(
            model=MODEL, messages=chat(question), max_tokens=24, **sampling, extra_body=IDS
        )
        expected = reference(engine, question, max_tokens=24, **sampling)
        choice = answer.choices[0]
        assert choice.token_ids == list(expected.token_ids)
        assert choice.prompt_token_ids == list(expected.prompt_token_ids)
        assert choice.message.content == expected.text
        assert choice.finish_reason == expected.finish_reason
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.usage.completion_tokens == expected.stats.num_tokens
        assert answer.fledge["accept_length"] == pytest.approx(
            (expected.stats.num_tokens - 1) / max(1, answer.fledge["cycles"]), abs=1e-4
        ) or (expected.stats.num_tokens == 1 and answer.fledge["accept_length"] is None)
        assert bool(answer.fledge["offered_at_depth"]) == (expected.stats.num_tokens > 1)
        assert answer.fledge["tokens_per_s"] > 0


def test_streams_at_the_same_time_equal_the_engine(server: RunningServer, engine: Engine) -> None:
    """Three times as many as the engine has room for, through the asynchronous client."""

    async def ask(client: openai.AsyncOpenAI, question: str, seed: int) -> tuple[str, Any]:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=chat(question),
            max_tokens=20,
            temperature=0.8,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text, usage

    async def ask_all() -> list[tuple[str, Any]]:
        async with server.async_openai() as client:
            return await asyncio.gather(
                *(ask(client, QUESTIONS[seed % len(QUESTIONS)], seed) for seed in range(12))
            )

    for seed, (text, usage) in enumerate(asyncio.run(ask_all())):
        question = QUESTIONS[seed % len(QUESTIONS)]
        expected = reference(engine, question, max_tokens=20, temperature=0.8, seed=seed)
        assert text == expected.text
        assert usage.completion_tokens == expected.stats.num_tokens


def test_stream_of_a_chat(server: RunningServer) -> None:
    chunks = list(
        server.openai.chat.completions.create(
            model=MODEL,
            messages=chat("Hello"),
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    assert pieces[-1].fledge["cycles"] > 0
    assert all(chunk.usage is None for chunk in pieces)
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert last.fledge["accept_length"] >= 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_with_usage_in_every_chunk(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with server.stream(max_tokens=8, temperature=0, stream_options=options) as events:
        *chunks, done = list(events)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert done == "[DONE]"


def test_completions_equal_the_engine(server: RunningServer, engine: Engine) -> None:
    """Several prompts, as texts and as token ids, and several answers to each."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in ("One two", "Three")]
    for given in (["One two", "Three"], prompts):
        answer = server.openai.completions.create(
            model=MODEL,
            prompt=given,
            n=2,
            max_tokens=12,
            temperature=0.7,
            seed=3,
            extra_body={**IDS, "top_k": 40, "min_p": 0.01},
        )
        params = [
            SamplingParams(max_tokens=12, temperature=0.7, seed=seed, top_k=40, min_p=0.01)
            for seed in (3, 4, 3, 4)
        ]
        expected = engine.generate([prompt for prompt in prompts for _ in range(2)], params)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice, one in zip(answer.choices, expected, strict=True):
            assert choice.token_ids == list(one.token_ids)
            assert choice.text == one.text
        assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_one_prompt_of_token_ids(server: RunningServer, engine: Engine) -> None:
    answer = server.openai.completions.create(
        model=MODEL, prompt=[70, 71, 72], temperature=0, extra_body=IDS
    )
    (expected,) = engine.generate([[70, 71, 72]], SamplingParams(max_tokens=16))
    assert answer.choices[0].token_ids == list(expected.token_ids)


def test_parameters_reach_the_engine(server: RunningServer, engine: Engine) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {100: 3.0},
    }
    further = {"repetition_penalty": 1.2, "min_tokens": 6, "stop_token_ids": [80, 81]}
    answer = server.openai.chat.completions.create(
        model=MODEL,
        messages=chat("Hello"),
        max_completion_tokens=30,
        extra_body={**IDS, **further},
        **{**given, "logit_bias": {"100": 3.0}},
    )
    expected = reference(
        engine, "Hello", max_tokens=30, **given, **{**further, "stop_token_ids": (80, 81)}
    )
    assert answer.choices[0].token_ids == list(expected.token_ids)


def test_stop_texts(server: RunningServer, engine: Engine) -> None:
    whole = reference(engine, "Hello", max_tokens=30).text
    stop = whole[8:10]
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=chat("Hello"), max_tokens=30, temperature=0, stop=[stop, "never"]
    )
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_of_a_chat(server: RunningServer, engine: Engine) -> None:
    asked: dict[str, Any] = {"max_tokens": 10, "temperature": 0}
    expected = reference(engine, "Hello", logprobs=3, **asked)
    assert expected.logprobs is not None
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=chat("Hello"), logprobs=True, top_logprobs=3, **asked
    )
    stream = server.openai.chat.completions.create(
        model=MODEL, messages=chat("Hello"), logprobs=True, top_logprobs=3, stream=True, **asked
    )
    streamed = [entry for chunk in stream for entry in chunk.choices[0].logprobs.content]
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in content]
    for entry, one in zip(content, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [logprob for _, logprob in one.top], abs=1e-4
        )
    said = b"".join(bytes(entry.bytes) for entry in content)
    assert said.decode("utf-8", errors="replace").startswith(expected.text[:3])


def test_logprobs_of_a_completion(server: RunningServer) -> None:
    answer = server.openai.completions.create(
        model=MODEL, prompt="Hello", max_tokens=6, temperature=0, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 6
    assert all(len(tops) == 2 for tops in found.top_logprobs), "greedy: the best is the chosen one"
    assert found.text_offset[0] == 0
    bare = server.complete(max_tokens=2, temperature=0, logprobs=0).json()["choices"][0]
    assert len(bare["logprobs"]["token_logprobs"]) == 2


def test_tools_and_variables_reach_the_template(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    asked = {"messages": chat("Hi"), "tools": [tool], "return_token_strs": True}
    document = server.post("/tokenize", asked).json()
    text = "".join(document["token_strs"])
    assert text.startswith('[{"type": "function"')
    assert "get_time" in text
    assert text.endswith("<|assistant|>")
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=chat("Hi"), tools=[tool], max_tokens=2
    )
    assert answer.usage.prompt_tokens == document["count"]
    silent = server.openai.chat.completions.create(
        model=MODEL, messages=chat("Hi"), tools=[tool], tool_choice="none", max_tokens=2
    )
    assert silent.usage.prompt_tokens < document["count"]
    shouting = server.post(
        "/tokenize", {"messages": chat("Hi"), "chat_template_kwargs": {"shout": True}}
    )
    assert shouting.json()["count"] == silent.usage.prompt_tokens + 1


def test_roles_and_parts_of_messages(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    document = server.post("/tokenize", {**asked, "return_token_strs": True}).json()
    assert "".join(document["token_strs"]) == "<|user|>one\ntwo<eos>"


def test_tokenize_a_text(server: RunningServer, engine: Engine) -> None:
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    document = server.post("/tokenize", {"prompt": "Größe"}).json()
    assert document == {
        "tokens": tokenizer.encode("Größe"),
        "count": len(tokenizer.encode("Größe")),
        "max_model_len": 512,
    }


def test_models(server: RunningServer) -> None:
    (model,) = server.openai.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 512)
    assert server.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        server.openai.models.retrieve("other")


def test_speculation_and_metrics(server: RunningServer) -> None:
    server.complete(max_tokens=12, temperature=0)
    server.wait_until_idle()
    document = server.http.get("/v1/speculation").json()
    assert document["settings"]["tree"] == {"depth": 3, "width": 3, "budget": 8}
    assert document["engine"]["state"] == "ready"
    assert document["acceptance_at_depth"][0] is not None
    assert document["stats"]["num_finished"] > 0
    page = server.http.get("/metrics").text
    for name in (
        'fledge_requests_total{path="/v1/completions",status="200"}',
        "fledge_engine_up 1.0",
        "fledge_answer_tokens_total",
        'fledge_drafts_offered_total{depth="1"}',
        "fledge_time_to_first_token_seconds_bucket",
        "fledge_requests_running 0.0",
    ):
        assert name in page, name


def test_request_ids(server: RunningServer) -> None:
    given = server.http.get("/v1/models", headers={"x-request-id": "my-id.1"})
    assert given.headers["x-request-id"] == "my-id.1"
    strange = server.http.get("/v1/models", headers={"x-request-id": "my id"})
    assert len(strange.headers["x-request-id"]) == 24


def test_openapi_document(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= document["paths"].keys()
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "429", "503", "504"} <= responses.keys()
    assert "422" not in responses
    model = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert model["enum"] == [MODEL]


def test_bench_agrees_with_what_the_server_says(
    server: RunningServer, run: RunProgram, tmp_path: Path
) -> None:
    """Loads of the bench, measured from outside, against what every response tells of itself."""
    done = run(
        "bench", server.url, "--out", tmp_path / "out", "--concurrency", "1,3", "--rates", "20",
        "--requests", "4", "--repeats", "1", "--max-tokens", "12", "--set", "bench.prompt_len=4",
        "--set", "bench.waves=1", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["arms"][0]["model"], document["arms"][0]["tokens"]) == (MODEL, "usage")
    for row in document["rows"]:
        assert row["good"] == row["requests"] == 4
        assert 4 <= row["tokens"] <= 4 * 12
        assert row["accept_length"]["value"] >= 1.0
        assert row["mean_prompt_tokens"] > 4
        # An answer cannot end before its first token, nor its tokens come before that.
        assert row["ttft_s"]["p50"]["value"] <= row["e2e_s"]["p50"]["value"]
    assert document["client"]["most_chunks_per_s"] > 100
