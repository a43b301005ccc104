"""The default target for real: what transformers says, with plain decoding and with drafts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge import Engine, SamplingParams
from fledge.testing import ScriptedDrafter, tiny_head
from tests.lossless.support import token_ids

pytestmark = pytest.mark.slow
MAX_TOKENS = 32


def test_smollm2_says_what_transformers_says(data_dir: Path) -> None:
    rows = (data_dir / "bench" / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(row)["turns"][0] for row in rows[:4]]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    engine = Engine.load("smollm2-135m-instruct", device="cpu", dtype="float32")
    target = engine.target
    completions = engine.generate(asked, params)
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=torch.float32).eval()
    for completion in completions:
        ids = torch.tensor([completion.prompt_token_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
        assert output[0, ids.shape[1] :].tolist() == list(completion.token_ids)
    plain = token_ids(completions)
    answers = {c.prompt_token_ids: c.token_ids for c in completions}
    drafter = ScriptedDrafter(answers, vocab_size=target.vocab_size, accuracy=0.8)
    assert token_ids(Engine(target, drafter=drafter).generate(asked, params)) == plain
    assert token_ids(Engine(target, tiny_head(target)).generate(asked, params)) == plain
