"""Sampling parameters that only the target can judge: token ids it does not have."""

from typing import Any

import pytest

from fledge import SamplingParams
from fledge.contracts.errors import RequestError
from fledge.engine.request import RequestMaker
from fledge.testing import EOS_TOKEN_ID, target_of, tiny_model

VOCAB_SIZE = 97


@pytest.fixture(scope="module")
def maker() -> RequestMaker:
    return RequestMaker(target_of(tiny_model("llama", num_hidden_layers=2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": (5, 97)}, "stop_token_ids holds token id 97; the target's vocabulary"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds token id -1; the target's vocabulary"),
        ({"logit_bias": {97: 1.0}}, "logit_bias names token id 97; the target's vocabulary has"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias names token id -3; the target's vocabulary has"),
        (
            {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 2},
            "all 97 tokens of the vocabulary end the answer, and min_tokens is 2",
        ),
    ],
)
def test_token_ids_must_be_the_targets(
    maker: RequestMaker, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        maker.make([5, 6], SamplingParams(**options))


def test_ids_at_the_edge_are_taken(maker: RequestMaker) -> None:
    params = SamplingParams(stop_token_ids=(0, 96), logit_bias={0: 1.0, 96: -1.0}, min_tokens=3)
    request = maker.make([5, 6], params)
    assert request.eos_token_ids == {0, 96, EOS_TOKEN_ID}
    every = SamplingParams(stop_token_ids=tuple(range(VOCAB_SIZE)))
    assert len(maker.make([5, 6], every).eos_token_ids) == VOCAB_SIZE
