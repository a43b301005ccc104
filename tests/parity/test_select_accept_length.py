"""`fledge select` counts what a plain loop over transformers counts, to the token."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.contracts.progress import SilentProgress
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import TreeSettings
from fledge.data.regenerate.journal import read_entries
from fledge.lab.select_job import prepare_job
from fledge.lab.select_stage import JOURNAL_NAME, select
from fledge.lab.visit_records import VisitRecord, answers_of
from fledge.testing import tiny_tokenizer
from fledge.testing_language import ask
from tests.parity.reference_head import Context, ReferenceHead, true_features

DEPTH, MAX_TOKENS, NUM_PROMPTS = 4, 18, 2


@torch.no_grad()
def decode(target: Path, head: Path, prompt: str) -> tuple[list[int], int]:
    """Greedy answer with a drafted chain, nothing cached: its tokens, and how many cycles."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    tokenizer = tiny_tokenizer()
    embedding = model.get_input_embeddings().weight
    drafter = ReferenceHead(head, embedding)
    taps = tuple(drafter.config["eagle_aux_hidden_state_layer_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, ends = len(tokens), model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    def choices(token_ids: list[int]) -> list[int]:
        return model(torch.tensor([token_ids])).logits[0].argmax(-1).tolist()

    def is_over() -> bool:
        return tokens[-1] in ends or len(tokens) - start == MAX_TOKENS

    tokens.append(choices(tokens)[-1])
    cycles = 0
    while not is_over():
        context = Context(tokens, true_features(model, tokens[:-1], taps))
        chain = max(drafter.candidates(context, DEPTH, 1), key=len)
        said = choices([*tokens, *chain])[len(tokens) - 1 :]
        cycles += 1
        for place, token in enumerate(said):
            tokens.append(token)
            if is_over() or place == len(chain) or chain[place] != token:
                break
    return tokens[start:], cycles


def test_accept_length_is_that_of_a_plain_loop(
    language_target: Path, language_run: Path, tmp_path: Path
) -> None:
    prompts = ask(NUM_PROMPTS, seed=31)
    suite = tmp_path / "animals.jsonl"
    suite.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    settings = SelectSettings(
        suites=(str(suite),),
        max_tokens=MAX_TOKENS,
        repeats=1,
        warm_up=0,
        tree=TreeSettings(depth=DEPTH, width=1, budget=DEPTH),
        controller="fixed",
    )
    head = sorted((language_run / "checkpoints").iterdir())[-1]
    job = prepare_job([head], str(language_target), settings, progress=SilentProgress())
    select(job, settings, tmp_path / "out")
    records = [
        VisitRecord.from_json(entry.row, entry.payload)
        for entry in read_entries(tmp_path / "out" / JOURNAL_NAME)
        if entry is not None
    ]
    found = {one.question: one for one in answers_of(records, str(head))}
    expected = [decode(language_target, head, prompt) for prompt in prompts]
    for number, (token_ids, cycles) in enumerate(expected, start=1):
        answer = found[f"animals/{number}"]
        assert (list(answer.token_ids), answer.cycles) == (token_ids, cycles)
    emitted = sum(len(token_ids) - 1 for token_ids, _ in expected)
    card = json.loads((tmp_path / "out" / "scorecard.json").read_text())
    assert card["heads"][0]["accept_length"]["value"] == pytest.approx(
        emitted / sum(cycles for _, cycles in expected), rel=1e-12
    )
    assert card["heads"][0]["accept_length"]["value"] > 1.3, "the head has learnt something"
    assert card["heads"][0]["differences"]["num_different"] == 0
