"""Grammars on CUDA: masks are made while the pass runs, and the text is that of plain decoding."""

import json

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.grammar import Grammar
from fledge.models.tokenizer import TargetTokenizer
from fledge.testing import target_of, tiny_head, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIGITS = {"type": "array", "items": {"enum": ["yes", "no", 7]}, "maxItems": 9}
GRAMMARS = [
    Grammar(kind="json_schema", text=json.dumps(DIGITS)),
    None,
    Grammar(kind="regex", text="(ab|cd|[0-9]){24}"),
    Grammar(kind="regex", text="[a-z ]+"),
]
TREE = EngineSettings(tree=TreeSettings(depth=4, width=4, budget=16), controller="fixed")


def check(device: torch.device) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer) + 4).to(device)
    target = target_of(model, TargetTokenizer(tokenizer))
    head = tiny_head(target, draft_vocab_size=len(tokenizer)).to(device)
    params = [
        SamplingParams(
            max_tokens=32, grammar=grammar, temperature=0.5 * (i % 2), seed=i, logprobs=1
        )
        for i, grammar in enumerate(GRAMMARS * 2)
    ]
    prompts = [[70 + i, 80, 90] for i in range(len(params))]
    plain = Engine(target).generate(prompts, params)
    drafted = Engine(target, head, TREE).generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    for one, two in zip(drafted, plain, strict=True):
        told = [entry.logprob for entry in one.logprobs or ()]
        assert told == pytest.approx([entry.logprob for entry in two.logprobs or ()], abs=1e-3)


def test_drafts_change_nothing() -> None:
    check(torch.device("cuda"))
