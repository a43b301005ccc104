"""Logit bias, fewest tokens, logprobs and logits that are no numbers, with and without drafts.

What transformers' generate can express is compared with it; the rest is compared with our own plain
decoding, request by request.
"""

from typing import Any

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import Completion, TokenLogprobs
from fledge.models.target import Target
from fledge.models.tokenizer import TargetTokenizer
from fledge.testing import EOS_TOKEN_ID, target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.lossless.support import MAX_TOKENS, greedy, pair, prompts, scripted, token_ids

ARCHITECTURES = ["llama", "gemma3-hybrid"]
TREE = EngineSettings(tree=TreeSettings(depth=4, width=3, budget=12))


def by_transformers(model: Any, asked: list[list[int]], **options: Any) -> list[list[int]]:
    answers = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            **options,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def engines(target: Target, asked: list[list[int]], answers: list[list[int]]) -> list[Engine]:
    return [
        Engine(target),
        Engine(target, tiny_head(target), TREE),
        Engine(target, drafter=scripted(asked, answers, accuracy=1.0)),
        Engine(target, drafter=scripted(asked, answers, accuracy=0.6, depth=8, width=2)),
        Engine(target, settings=EngineSettings(max_requests=2, max_pass_tokens=8)),
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bias_penalty_and_fewest_tokens_equal_transformers(architecture: str) -> None:
    """All three at once: their order matters to the repetition penalty."""
    model, target = pair(architecture)
    asked = prompts(4)
    plain = greedy(architecture, asked)
    often = max(range(97), key=lambda token: sum(answer.count(token) for answer in plain))
    bias = {often: -9.0, EOS_TOKEN_ID: 12.0, 11: 3.0}
    expected = by_transformers(
        model,
        asked,
        sequence_bias={(token,): value for token, value in bias.items()},
        repetition_penalty=1.2,
        min_new_tokens=7,
    )
    assert any(len(answer) < MAX_TOKENS for answer in expected), "the bias ends some answers"
    assert all(len(answer) >= 7 for answer in expected)
    params = SamplingParams(
        max_tokens=MAX_TOKENS, logit_bias=bias, repetition_penalty=1.2, min_tokens=7
    )
    for engine in engines(target, asked, expected):
        completions = engine.generate(asked, params)
        assert token_ids(completions) == expected
        for completion, answer in zip(completions, expected, strict=True):
            ended = answer[-1] == EOS_TOKEN_ID
            assert completion.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_company_and_drafts_do_not_change_what_rules_make_of_a_request(architecture: str) -> None:
    _, target = pair(architecture)
    asked = prompts(6)
    mixes: list[dict[str, Any]] = [
        {"logit_bias": {5: 4.0, 6: -4.0}, "temperature": 1.0},
        {},
        {"min_tokens": 12, "stop_token_ids": tuple(range(40))},
        {"logit_bias": {EOS_TOKEN_ID: 8.0}, "min_tokens": 5, "temperature": 0.8, "top_p": 0.9},
        {"presence_penalty": 1.0, "logit_bias": {9: 5.0}},
        {"temperature": 1.3, "frequency_penalty": 0.6, "min_tokens": 3},
    ]
    params = [SamplingParams(max_tokens=20, seed=i, **mix) for i, mix in enumerate(mixes)]
    alone = [
        token_ids(Engine(target).generate([prompt], one))[0]
        for prompt, one in zip(asked, params, strict=True)
    ]
    assert all(token >= 40 for token in alone[2][:11])
    assert len(alone[2]) < 20
    for engine in engines(target, asked, alone):
        assert token_ids(engine.generate(asked, params)) == alone


def test_counts_survive_the_loss_of_memory() -> None:
    """A request that is preempted reads its own answer again and must not count it twice."""
    _, target = pair("llama")
    asked = prompts(4)
    params = [
        SamplingParams(max_tokens=20, frequency_penalty=0.9, repetition_penalty=1.2, seed=i)
        for i in range(4)
    ]
    alone = token_ids(Engine(target).generate(asked, params))
    engine = Engine(target, tiny_head(target), TREE)
    requests = [engine.make_request(*one) for one in zip(asked, params, strict=True)]
    sequences = [engine.add(request) for request in requests]
    cycle = 0
    while engine.has_work:
        engine.step()
        cycle += 1
        engine.preempt(sequences[cycle % 4])
    assert [seq.output_ids for seq in sequences] == alone
    assert sum(seq.num_preemptions for seq in sequences) > 8


@pytest.mark.parametrize(
    "stop",
    [
        ("xx",),
        ("xx", "y" * 12),
    ],
)
def test_stop_texts_wait_for_the_fewest_tokens(stop: tuple[str, ...]) -> None:
    """One that ends among the first tokens is text like any other."""
    tokenizer = TargetTokenizer(tiny_tokenizer())
    target = target_of(tiny_model("llama", vocab_size=tokenizer.num_tokens), tokenizer)
    letter = tokenizer.encode("x")[0]
    params = SamplingParams(max_tokens=12, logit_bias={letter: 1e4}, stop=stop, min_tokens=7)
    for engine in (Engine(target), Engine(target, tiny_head(target), TREE)):
        (completion,) = engine.generate([[7, 8, 9]], params)
        assert completion.finish_reason == "stop"
        assert completion.token_ids == (letter,) * 7
        assert completion.text == "x" * 5


def records(completion: Completion) -> tuple[TokenLogprobs, ...]:
    assert completion.logprobs is not None
    return completion.logprobs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_logprobs_are_the_targets_own(architecture: str, temperature: float) -> None:
    """Those of one plain forward pass over the whole text, for drafted tokens too."""
    model, target = pair(architecture)
    asked = prompts(4)
    params = [
        SamplingParams(
            max_tokens=16, temperature=temperature, seed=i, logit_bias={11: 2.0}, logprobs=n
        )
        for i, n in enumerate([3, None, 0, 20])
    ]
    plain = token_ids(Engine(target).generate(asked, params))
    for engine in engines(target, asked, plain):
        completions = engine.generate(asked, params)
        assert token_ids(completions) == plain
        assert completions[1].logprobs is None
        for prompt, one, completion in zip(asked, params, completions, strict=True):
            if one.logprobs is None:
                continue
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(dim=-1)
            found = records(completion)
            assert [record.token_id for record in found] == list(completion.token_ids)
            chosen = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            values = [record.logprob for record in found]
            assert values == pytest.approx(chosen.tolist(), abs=1e-3)
            best = expected.topk(one.logprobs)
            for record, top in zip(found, best.values.tolist(), strict=True):
                assert [value for _, value in record.top] == pytest.approx(top, abs=1e-3)
            tops = [[token for token, _ in record.top] for record in found]
            assert tops == best.indices.tolist()


def test_streamed_logprobs_are_those_of_the_completion() -> None:
    _, target = pair("llama")
    prompt = prompts(2)[1]
    params = SamplingParams(max_tokens=16, logprobs=2)
    answer = greedy("llama", [prompt], max_tokens=16)
    engine = Engine(target, drafter=scripted([prompt], answer))
    collected: list[TokenLogprobs] = []
    for chunk in engine.stream(prompt, params):
        assert chunk.logprobs is not None
        assert [record.token_id for record in chunk.logprobs] == list(chunk.token_ids)
        collected += chunk.logprobs
        if chunk.completion is not None:
            assert tuple(collected) == records(chunk.completion)
    assert len(collected) == 16


MARKER = 96
"""A token whose embedding is NaN, and with it everything that is computed after it."""
HEAD_WITHOUT_MARKER = 9
"""Seed of a head that has no such token in its vocabulary."""


def spoiled(architecture: str) -> Target:
    model = tiny_model(architecture)
    with torch.no_grad():
        model.get_input_embeddings().weight[MARKER] = float("nan")
        # It is never said unless a bias asks for it.
        model.get_output_embeddings().weight[MARKER] = 0.0
    return target_of(model)


@pytest.mark.parametrize("architecture", ["gemma3-hybrid", "qwen3-moe"])
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("fails_at", ["prompt", "answer"])
def test_a_request_without_numbers_fails_and_the_others_go_on(
    architecture: str, has_head: bool, fails_at: str
) -> None:
    target = spoiled(architecture)
    asked = prompts(5, vocab_size=MARKER)
    params = [SamplingParams(max_tokens=12, seed=i, temperature=i % 2) for i in range(5)]
    expected = token_ids(Engine(target).generate(asked, params))
    if fails_at == "prompt":
        asked[2] = [7, MARKER, 8]
    else:
        params[2] = SamplingParams(max_tokens=12, logit_bias={MARKER: 1e4})
    head = tiny_head(target, seed=HEAD_WITHOUT_MARKER) if has_head else None
    engine = Engine(target, head, TREE)
    for _ in range(2):  # the second time in memory that the failed request has left behind
        requests = [engine.make_request(*one) for one in zip(asked, params, strict=True)]
        sequences = [engine.add(request) for request in requests]
        while engine.has_work:
            engine.step()
        failed = sequences.pop(2)
        assert failed.output_ids == ([] if fails_at == "prompt" else [MARKER])
        assert isinstance(failed.error, RequestError)
        assert "are not numbers; its weights or its precision are at fault" in str(failed.error)
        assert [seq.error for seq in sequences] == [None] * 4
        assert [seq.output_ids for seq in sequences] == expected[:2] + expected[3:]
    with pytest.raises(RequestError, match="are not numbers"):
        engine.generate([asked[2]], params[2])
    assert token_ids(engine.generate(asked[:2], params[:2])) == expected[:2]


def test_drafts_without_numbers_do_not_fail_a_request() -> None:
    """Drafts decide how far a pass gets: a bad one that is not accepted must change nothing."""
    target = spoiled("llama")
    asked = prompts(4, vocab_size=MARKER)
    params = SamplingParams(max_tokens=MAX_TOKENS, frequency_penalty=0.5)
    expected = token_ids(Engine(target).generate(asked, params))
    engine = Engine(target, drafter=scripted(asked, expected, accuracy=0.8, budget=24))
    assert token_ids(engine.generate(asked, params)) == expected
