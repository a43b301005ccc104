"""`fledge generate`: what it prints, and that it is what the target says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import Run, RunProgram

PROMPT = "The eagle left the nest"
KEYS = {
    "text",
    "token_ids",
    "prompt_token_ids",
    "num_tokens",
    "tokens_per_s",
    "accept_length",
    "cycles",
    "finish_reason",
    "logprobs",
    "target",
    "target_dir",
    "head",
    "offered_at_depth",
    "accepted_at_depth",
    "num_copies_offered",
    "num_copies_accepted",
    "time_to_first_token_s",
    "time_per_token_s",
    "num_prompt_reused",
}


def document(run: Run) -> dict[str, Any]:
    """What was printed, which must be one JSON document and nothing else."""
    assert run.exit_code == 0, run.stderr
    parsed = json.loads(run.stdout)
    assert isinstance(parsed, dict)
    return parsed


def transformers_greedy(directory: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
    )
    return output[0, len(prompt_ids) :].tolist()


@pytest.mark.parametrize("shape", [(), ("--depth", 3, "--width", 2, "--budget", 5)])
@pytest.mark.parametrize("has_head", [False, True])
def test_json_is_what_transformers_says(
    run: RunProgram, target_dir: Path, head_dir: Path, has_head: bool, shape: tuple[object, ...]
) -> None:
    head = head_dir if has_head else "none"
    answer = document(
        run(
            *("generate", "--target", target_dir, "--head", head, "--prompt", PROMPT),
            *("--max-tokens", 40, "--temperature", 0, "--dtype", "float32", "--json", *shape),
        )
    )
    assert set(answer) == KEYS
    expected = transformers_greedy(answer["target_dir"], answer["prompt_token_ids"], 40)
    assert answer["token_ids"] == expected
    assert answer["num_tokens"] == len(expected)
    assert answer["target"] == str(target_dir)
    assert answer["head"] == (str(head_dir) if has_head else None)
    assert answer["accept_length"] == (answer["num_tokens"] - 1) / answer["cycles"]
    if not has_head:
        assert answer["accept_length"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(answer["target_dir"])
    assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_chat_template_unless_raw(run: RunProgram, target_dir: Path) -> None:
    options = ("generate", "--target", target_dir, "--prompt", PROMPT, "--max-tokens", 1, "--json")
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    messages = [{"role": "user", "content": PROMPT}]
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert document(run(*options))["prompt_token_ids"] == templated
    assert document(run(*options, "--raw"))["prompt_token_ids"] == tokenizer(PROMPT)["input_ids"]


def test_target_without_template_reads_the_prompt_as_it_is(
    run: RunProgram, plain_target_dir: Path
) -> None:
    options = ("generate", "--target", plain_target_dir, "--prompt", PROMPT, "--max-tokens", 1)
    ids = AutoTokenizer.from_pretrained(plain_target_dir)(PROMPT)["input_ids"]
    assert document(run(*options, "--json"))["prompt_token_ids"] == ids


def test_no_cycle_has_no_accept_length(run: RunProgram, target_dir: Path) -> None:
    options = ("generate", "--target", target_dir, "--prompt", PROMPT, "--max-tokens", 1)
    answer = document(run(*options, "--json"))
    assert (answer["cycles"], answer["accept_length"]) == (0, None)


def test_seed_decides_the_text_and_the_head_does_not(
    run: RunProgram, target_dir: Path, head_dir: Path
) -> None:
    def sample(seed: int, head: object = "none") -> list[int]:
        return document(
            run(
                *("generate", "--target", target_dir, "--prompt", PROMPT, "--head", head),
                *("--max-tokens", 24, "--temperature", 1.5, "--top-p", 0.9, "--seed", seed),
                *("--dtype", "float32", "--json"),
            )
        )["token_ids"]

    assert sample(1) == sample(1) == sample(1, head_dir)
    assert sample(1) != sample(2)


def test_text_on_stdout_and_figures_on_stderr(
    run: RunProgram, target_dir: Path, head_dir: Path
) -> None:
    options = ("generate", "--target", target_dir, "--prompt", PROMPT, "--max-tokens", 20)
    text = document(run(*options, "--json"))["text"]
    shown = run(*options, "--head", head_dir)
    assert shown.exit_code == 0
    assert shown.stdout == text + "\n"
    assert "tokens/s" in shown.stderr
    assert "accept length" in shown.stderr


def test_stop_text_ends_the_answer(run: RunProgram, target_dir: Path) -> None:
    options = ("generate", "--target", target_dir, "--prompt", PROMPT, "--max-tokens", 30, "--json")
    whole = document(run(*options))["text"]
    stop = whole[4:6]
    cut = document(run(*options, "--stop", "not in the answer", "--stop", stop))
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_fewest_tokens_bias_and_logprobs(run: RunProgram, target_dir: Path, head_dir: Path) -> None:
    options = ("generate", "--target", target_dir, "--prompt", PROMPT, "--max-tokens", 8, "--json")
    plain = document(run(*options))
    assert plain["logprobs"] is None
    unwanted, wanted = plain["token_ids"][0], plain["token_ids"][0] + 1
    rules = ("--min-tokens", 8, "--logit-bias", f"{unwanted}=-1e4", "--logprobs", 2)
    for head in ("none", head_dir):
        told = document(run(*options, *rules, "--head", head))
        assert unwanted not in told["token_ids"]
        assert told["num_tokens"] == len(told["logprobs"]) == 8
        assert [one["token_id"] for one in told["logprobs"]] == told["token_ids"]
        assert told["logprobs"][0]["top"][0][0] == unwanted, "logprobs are those before the bias"
        assert all(len(one["top"]) == 2 for one in told["logprobs"])
    forced = document(run(*options, "--logit-bias", f"{wanted}=1e4"))
    assert set(forced["token_ids"]) == {wanted}


def test_prompt_from_stdin(run: RunProgram, target_dir: Path) -> None:
    options = ("generate", "--target", target_dir, "--max-tokens", 5, "--json")
    piped = document(run(*options, "--prompt", "-", stdin=PROMPT + "\n"))
    assert (
        piped["prompt_token_ids"] == document(run(*options, "--prompt", PROMPT))["prompt_token_ids"]
    )


def test_several_prompts_are_answered_together(run: RunProgram, target_dir: Path) -> None:
    options = ("generate", "--target", target_dir, "--max-tokens", 12)
    prompts = [PROMPT, "Another one"]
    alone = [document(run(*options, "--prompt", prompt, "--json")) for prompt in prompts]
    both = ("--prompt", prompts[0], "--prompt", prompts[1])
    together = document(run(*options, *both, "--json"))
    assert set(together) == {"completions", "target", "target_dir", "head"}
    assert [answer["token_ids"] for answer in together["completions"]] == [
        answer["token_ids"] for answer in alone
    ]
    shown = run(*options, *both)
    assert shown.stdout == "".join(answer["text"] + "\n" for answer in alone)


def test_rejection_rule_is_greedy_at_temperature_zero(
    run: RunProgram, target_dir: Path, head_dir: Path
) -> None:
    options = ("generate", "--target", target_dir, "--prompt", PROMPT, "--max-tokens", 16, "--json")
    plain = document(run(*options))
    other = document(run(*options, "--head", head_dir, "--accept", "rejection"))
    assert other["token_ids"] == plain["token_ids"]
