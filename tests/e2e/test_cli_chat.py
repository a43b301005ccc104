"""`fledge chat` over a pipe: turns, commands, and what happens when the context is full."""

from pathlib import Path

import pytest

from fledge.engine.engine import Engine, SamplingParams
from tests.e2e.conftest import RunProgram

FIRST, SECOND = "Hello there", "And then?"
PARAMS = SamplingParams(max_tokens=20)


class Oracle:
    """What the engine answers to a list of turns."""

    def __init__(self, directory: Path) -> None:
        self._engine = Engine.load(str(directory), dtype="float32", device="cpu")

    def answer(self, *turns: str, system: str | None = None) -> str:
        roles = ("user", "assistant")
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        return self._engine.generate([messages], PARAMS)[0].text


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


def chat_options(target_dir: Path) -> tuple[object, ...]:
    return ("chat", "--target", target_dir, "--dtype", "float32", "--max-tokens", PARAMS.max_tokens)


def test_two_turns_then_reset(run: RunProgram, target_dir: Path, oracle: Oracle) -> None:
    outcome = run(
        *chat_options(target_dir), stdin=f"{FIRST}\n\n{SECOND}\n/reset\n{FIRST}\n/quit\nnever\n"
    )
    one = oracle.answer(FIRST)
    two = oracle.answer(FIRST, one, SECOND)
    assert outcome.exit_code == 0
    assert outcome.stdout == f"{one}\n{two}\n{one}\n"
    assert outcome.stderr.count("tokens/s") == 3
    assert outcome.stderr.count("accept length") == 3


def test_system_text_survives_a_reset(run: RunProgram, target_dir: Path, oracle: Oracle) -> None:
    outcome = run(
        *chat_options(target_dir), "--system", "Be brief.", stdin=f"{FIRST}\n/reset\n{FIRST}"
    )
    answer = oracle.answer(FIRST, system="Be brief.")
    assert outcome.stdout == f"{answer}\n{answer}\n"
    assert answer != oracle.answer(FIRST)


def test_full_context_loses_nothing(run: RunProgram, target_dir: Path, oracle: Oracle) -> None:
    """A message that does not fit is refused, kept for /retry, and leaves the turns before it."""
    long = "x" * 470
    outcome = run(
        *chat_options(target_dir), stdin=f"{FIRST}\n{long}\n{SECOND}\n{long}\n/reset\n/retry\n"
    )
    one = oracle.answer(FIRST)
    assert outcome.stdout == (
        f"{one}\n{oracle.answer(FIRST, one, SECOND)}\n{oracle.answer(long)}\n"
    )
    assert outcome.stderr.count("error: the prompt has") == 2
    assert "your message is kept" in outcome.stderr
    assert outcome.exit_code == 2  # a script must notice that a message went unanswered


def test_commands(run: RunProgram, target_dir: Path) -> None:
    outcome = run(*chat_options(target_dir), stdin="/help\n/dance\n/retry\n")
    assert outcome.stdout == ""
    assert "/reset" in outcome.stderr
    assert "error: unknown command '/dance'" in outcome.stderr
    assert "error: every message has been answered" in outcome.stderr


def test_target_without_template_points_at_generate(
    run: RunProgram, plain_target_dir: Path
) -> None:
    outcome = run("chat", "--target", plain_target_dir, stdin="Hello\n")
    assert outcome.exit_code == 2
    assert "fledge generate --raw" in outcome.error
