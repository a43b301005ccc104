"""`--engine` without any other engine installed: refusals, and commands to print."""

from pathlib import Path

import pytest

from fledge.cli.options import ENGINE, TREE
from fledge.models.head_files import save_head
from fledge.testing import target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.e2e.conftest import RunProgram


def save_exportable(directory: Path) -> None:
    """A target of four layers has no three default ones."""
    model = target_of(tiny_model("llama", vocab_size=len(tiny_tokenizer())))
    save_head(tiny_head(model, taps=(1, 2, 3)), directory)


def test_serve_prints_the_command_without_the_engine(
    run: RunProgram, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    save_exportable(tmp_path / "head")
    options = ("--engine", "vllm", "--print-command", "--port", 9000, "--max-requests", 4)
    outcome = run("serve", "--target", target_dir, "--head", tmp_path / "head", *options)
    assert (outcome.exit_code, outcome.stdout.count("\n")) == (0, 1)
    exported = next((tmp_path / "exports").glob("vllm-*"))
    assert outcome.stdout.startswith(f"vllm serve {target_dir} --speculative-config ")
    assert f'"model": "{exported}", "num_speculative_tokens": 3' in outcome.stdout
    assert "--port 9000 --served-model-name tiny" in outcome.stdout


@pytest.mark.parametrize(
    ("words", "chain"),
    [
        ((), 3),
        (("--depth", TREE.depth), TREE.depth),
        (("--width", TREE.width), TREE.depth),
        (("--budget", TREE.budget), TREE.depth),
        (("--depth", 2, "--controller", "adaptive"), 2),
    ],
)
def test_a_usual_value_counts_when_it_is_typed(
    run: RunProgram,
    target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    chain: int,
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    save_exportable(tmp_path / "head")
    options = ("--head", tmp_path / "head", "--engine", "vllm", "--print-command", *words)
    outcome = run("serve", "--target", target_dir, *options)
    assert outcome.exit_code == 0, outcome.stderr
    assert f'"num_speculative_tokens": {chain}' in outcome.stdout


@pytest.mark.parametrize(
    ("words", "slots"),
    [((), 4), (("--max-requests", 9), 9), (("--max-requests", ENGINE.max_requests), 32)],
)
def test_llama_cpp_is_given_few_slots_unless_more_are_asked_for(
    run: RunProgram,
    target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    slots: int,
) -> None:
    """It takes the memory of each beforehand: 32 of them would be gigabytes for a small target."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    options = ("--engine", "llamacpp", "--print-command", *words)
    outcome = run("serve", "--target", target_dir, *options)
    assert outcome.exit_code == 0, outcome.stderr
    assert f"--parallel {slots} --ctx-size " in outcome.stdout


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("--engine", "vllm"), 2, "vLLM is not installed for"),
        (("--engine", "tgi"), 2, "'tgi' is not one of 'fledge', 'vllm'"),
        (("--print-command",), 2, "--print-command is for other engines"),
        (("--engine-python", "python3"), 2, "--engine-python is for other engines"),
        (("--engine", "vllm", "--log-prompts"), 2, "--log-prompts is of fledge's own server"),
        (
            ("--engine", "vllm", "--set", "serve.cors_origins=['http://a']"),
            2,
            "serve.cors_origins is of fledge's own server",
        ),
        (("--tuned", "nowhere", "--depth", 3), 2, "--tuned says how to draft"),
        (("--tuned", "nowhere", "--width", TREE.width), 2, "--tuned says how to draft"),
        (("--engine", "vllm", "--print-command", "--max-requests", 0), 2, "max_requests is 0"),
        (("--tuned", "nowhere"), 1, "there are no tuned settings at nowhere"),
    ],
)
def test_serve_refuses(
    run: RunProgram, target_dir: Path, words: tuple[object, ...], exit_code: int, message: str
) -> None:
    outcome = run("serve", "--target", target_dir, *words)
    assert message in outcome.error
    assert (outcome.exit_code, outcome.stdout) == (exit_code, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# none\n", "holds no API key"),
        ("one,two\n", "holds a comma"),
        (None, "cannot be read"),
    ],
)
def test_keys_that_cannot_be_handed_over_are_refused(
    run: RunProgram, target_dir: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    keys = tmp_path / "keys"
    if text is not None:
        keys.write_text(text)
    options = ("--engine", "vllm", "--print-command", "--api-keys", keys)
    outcome = run("serve", "--target", target_dir, *options)
    assert message in outcome.error
    assert outcome.exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine", "sglang"), "SGLang is not installed for"),
        (("--engine", "vllm", "--logprobs", 1, "--json"), "--logprobs are given by fledge's own"),
        (("--engine", "llamacpp", "--min-tokens", 3), "llama.cpp knows no --min-tokens"),
        (("--engine-python", "python3"), "--engine-python is for other engines"),
    ],
)
def test_generate_refuses(
    run: RunProgram, target_dir: Path, words: tuple[object, ...], message: str
) -> None:
    outcome = run("generate", "--target", target_dir, "--prompt", "x", *words)
    assert message in outcome.error
    assert (outcome.exit_code, outcome.stdout) == (2, "")
