"""What a request asks for, as the engine gets it; single tokens as text."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.models.tokenizer import TargetTokenizer
from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_requests import ChatRequest, CompletionRequest
from fledge.server.parameters import Allowance, model_defaults, params_of
from fledge.server.token_text import TokenText
from fledge.testing import tiny_tokenizer

ALLOWANCE = Allowance(max_tokens=100)


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})


def test_defaults_are_openais() -> None:
    (of_chat,) = params_of(chat(), ALLOWANCE, 10)
    assert (of_chat.max_tokens, of_chat.temperature, of_chat.logprobs) == (90, 1.0, None)
    (of_completion,) = params_of(completion(), ALLOWANCE, 10)
    assert of_completion.max_tokens == 16
    assert of_chat.seed != of_completion.seed, "without a seed every request has its own"


def test_the_targets_makers_are_followed(tmp_path: Path) -> None:
    assert model_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": None, "x": 1}))
    defaults = model_defaults(tmp_path)
    assert defaults == {"temperature": 0.6, "top_k": 20}
    allowance = Allowance(max_tokens=100, defaults=defaults)
    (params,) = params_of(chat(), allowance, 10)
    assert (params.temperature, params.top_k) == (0.6, 20)
    (params,) = params_of(chat(temperature=0, top_k=-1), allowance, 10)
    assert (params.temperature, params.top_k) == (0.0, 0)


@pytest.mark.parametrize("content", ["{", json.dumps({"top_p": 7})])
def test_makers_that_cannot_be_followed(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert model_defaults(tmp_path) == {}
    assert "generation_config.json of the target" in caplog.text


def test_seeds_of_several_answers() -> None:
    assert [one.seed for one in params_of(chat(n=3, seed=2**63 - 1), ALLOWANCE, 1)] == [
        2**63 - 1,
        0,
        1,
    ]
    assert params_of(chat(seed=-1), ALLOWANCE, 1)[0].seed == 2**63 - 1


def test_lengths() -> None:
    limited = Allowance(max_tokens=100, max_prompt_tokens=20, max_answer_tokens=30)
    assert params_of(chat(), limited, 10)[0].max_tokens == 30
    assert params_of(chat(max_completion_tokens=25, max_tokens=3), limited, 10)[0].max_tokens == 25
    assert params_of(completion(max_tokens=30), limited, 90)[0].max_tokens == 10
    with pytest.raises(InvalidRequestError, match="max_tokens is 31 and this server allows"):
        params_of(chat(max_tokens=31), limited, 10)
    limited.check_prompt(20)
    with pytest.raises(InvalidRequestError, match="has 21 tokens and this server takes at most 20"):
        limited.check_prompt(21)
    with pytest.raises(InvalidRequestError, match="takes at most 99"):
        ALLOWANCE.check_prompt(100)


def test_logprobs_of_both_endpoints() -> None:
    assert params_of(chat(logprobs=True), ALLOWANCE, 1)[0].logprobs == 0
    assert params_of(chat(logprobs=True, top_logprobs=4), ALLOWANCE, 1)[0].logprobs == 4
    assert params_of(completion(logprobs=0), ALLOWANCE, 1)[0].logprobs == 0


def test_cold_is_greedy() -> None:
    assert params_of(chat(temperature=1e-300), ALLOWANCE, 1)[0].temperature == 0.0


def test_prompts_of_every_kind() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2]]).prompts == [[1], [2]]


def test_tokens_of_a_byte_level_vocabulary() -> None:
    tokenizer = TargetTokenizer(tiny_tokenizer())
    text = TokenText(tokenizer)
    ids = tokenizer.encode("a ü\n")
    assert b"".join(text.bytes_of(one) for one in ids) == "a ü\n".encode()
    assert [text.text_of(one) for one in ids] == ["a", " ", "\ufffd", "\ufffd", "\n"]
    assert text.text_of(2) == "<eos>"


def test_tokens_of_a_vocabulary_with_marked_spaces() -> None:
    class Marked:
        special_tokens = {"<s>": 1}
        spellings = ("<unk>", "<s>", "\u2581the", "<0xE2>", "é")

        def spelling(self, token_id: int) -> str:
            return self.spellings[token_id]

        def encode_all(self, texts: list[str]) -> list[list[int]]:
            return [[3] for _ in texts]

    text = TokenText(Marked())
    assert [text.bytes_of(one) for one in range(1, 5)] == [b"<s>", b" the", b"\xe2", "é".encode()]
