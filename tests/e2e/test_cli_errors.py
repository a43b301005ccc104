"""Bad input: one line that says what to do, the right exit code, nothing on stdout."""

from pathlib import Path

import pytest
import torch

from fledge.cli import prompts
from fledge.cli.main import main
from tests.e2e.conftest import RunProgram


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (("--prompt", ""), 2, "the prompt is empty"),
        (("--prompt", "", "--raw"), 2, "the prompt is empty"),
        (("--prompt", " \n "), 2, "the prompt is empty"),
        (("--prompt", "x", "--prompt", ""), 2, "prompt 2 is empty"),
        (("--prompt", "-"), 2, "the prompt is empty"),
        (("--prompt", "-", "--prompt", "-"), 2, "stdin can be read only once"),
        (("--prompt", "\udcff"), 2, "not valid UTF-8"),
        (("--prompt", "x", "--temperature", -1), 2, "temperature is -1.0"),
        (("--prompt", "x", "--temperature", "warm"), 2, "'--temperature'"),
        (("--prompt", "x", "--max-tokens", 0), 2, "max_tokens is 0"),
        (("--prompt", "x", "--min-tokens", 300), 2, "min_tokens is 300 and max_tokens is 256"),
        (("--prompt", "x", "--logit-bias", "13:5"), 2, "'13:5' is not of the form ID=B"),
        (("--prompt", "x", "--logit-bias", "9999=1"), 2, "logit_bias names token id 9999"),
        (("--prompt", "x", "--logit-bias", "3=nan"), 2, "logit_bias of token 3 is nan"),
        (("--prompt", "x", "--top-p", 0), 2, "top_p is 0.0"),
        (("--prompt", "x", "--seed", -1), 2, "seed is -1"),
        (("--prompt", "x", "--stop", ""), 2, "a stop text is empty"),
        (("--prompt", "x", "--depth", 0), 2, "tree depth is 0"),
        (("--prompt", "x", "--budget", 5000), 2, "tree budget is 5000"),
        (("--prompt", "x", "--accept", "maybe"), 2, "'gumbel', 'rejection'"),
        (("--prompt", "x", "--dtype", "float33"), 2, "'float33' is not one of 'auto'"),
        (("--prompt", "x", "--device", "tpu"), 2, "unknown device 'tpu'"),
        (("--prompt", "x", "--device", "cuda:99"), 2, "'cuda:99' was asked for"),
        (("--prompt", "x", "--head", "/no/such/head"), 1, "/no/such/head"),
        (("--prompt", "x" * 600), 2, "the target's context holds 512"),
        (("--prompt", "x", "--colour"), 2, "No such option: --colour"),
        ((), 2, "Missing option '--prompt'"),
    ],
)
def test_wrong_use(
    run: RunProgram,
    target_dir: Path,
    options: tuple[object, ...],
    exit_code: int,
    message: str,
    is_json: bool,
) -> None:
    outcome = run("generate", "--target", target_dir, *options, *["--json"] * is_json)
    assert message in outcome.error
    assert outcome.exit_code == exit_code
    assert outcome.stdout == ""


def test_logprobs_need_json(run: RunProgram, target_dir: Path) -> None:
    outcome = run("generate", "--target", target_dir, "--prompt", "x", "--logprobs", 3)
    assert outcome.exit_code == 2
    assert outcome.error == "--logprobs are shown in JSON only; add --json."
    outcome = run("generate", "--target", target_dir, "--prompt", "x", "--logprobs", 21, "--json")
    assert outcome.exit_code == 2
    assert outcome.error == "logprobs is 21; it must be between 0 and 20."


def test_unknown_target_gets_a_suggestion(run: RunProgram) -> None:
    outcome = run("generate", "--target", "smolm2-135m-instruct", "--prompt", "x")
    assert outcome.exit_code == 2
    assert "did you mean 'smollm2-135m-instruct'" in outcome.error


def test_head_of_another_target(run: RunProgram, target_dir: Path, foreign_head_dir: Path) -> None:
    outcome = run(
        *("generate", "--target", target_dir, "--head", foreign_head_dir, "--prompt", "x")
    )
    assert outcome.exit_code == 1
    assert "64" in outcome.error
    assert "32" in outcome.error


def test_damaged_head(run: RunProgram, target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((head_dir / "config.json").read_bytes())
    weights = (head_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    outcome = run("generate", "--target", target_dir, "--head", tmp_path, "--prompt", "x")
    assert outcome.exit_code == 1
    assert "damaged or truncated" in outcome.error


def test_unknown_verb_gets_a_suggestion(run: RunProgram) -> None:
    outcome = run("generat")
    assert outcome.exit_code == 2
    assert "Did you mean 'generate'" in outcome.error


def test_debug_shows_the_traceback_wherever_it_stands(
    run: RunProgram, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "--target", str(target_dir), "--prompt", ""]
    for arguments in (["--debug", *options], [*options, "--debug"]):
        assert main(arguments) == 2
        stderr = capsys.readouterr().err
        assert "Traceback" in stderr
        assert stderr.splitlines()[-1].startswith("error: the prompt is empty")


def test_unexpected_error_points_at_debug(run: RunProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down() -> str:
        raise ZeroDivisionError("nobody thought of this\nsecond line")

    monkeypatch.setattr(prompts, "_read_stdin", break_down)
    outcome = run("generate", "--prompt", "-")
    assert outcome.exit_code == 1
    assert outcome.error == (
        "unexpected ZeroDivisionError: nobody thought of this; "
        "run again with --debug for the traceback"
    )


@pytest.mark.parametrize(
    ("kind", "message", "begins"),
    [
        (
            torch.OutOfMemoryError,
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 "
            "GiB of which 10.25 MiB is free. Process 3727 has 66.00 MiB memory in use.",
            "GPU 0 has 10.25 MiB of its 139.80 GiB left, and 20.00 MiB more were asked for; ",
        ),
        (torch.OutOfMemoryError, "HIP out of memory.", "the GPU's memory is used up; "),
        (RuntimeError, "CUDA error: out of memory\nCompile with", "the GPU's memory is used up; "),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when", "the GPU's memory is used"),
    ],
)
def test_a_device_that_others_filled_is_no_riddle(
    run: RunProgram,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    message: str,
    begins: str,
) -> None:
    def run_out() -> str:
        raise kind(message)

    monkeypatch.setattr(prompts, "_read_stdin", run_out)
    outcome = run("generate", "--prompt", "-")
    assert outcome.exit_code == 1
    assert outcome.error.startswith(begins)
    assert "regenerate.cache_tokens of prepare and regenerate" in outcome.error
