"""The program as a process: Ctrl-C, a reader that leaves, a real terminal."""

import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.warm_programs import WarmPrograms

ENDLESS = ("--prompt", "Go on", "--max-tokens", "900000")


def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def is_about_loading(line: str) -> bool:
    is_told = line.startswith("loading ") or line.endswith("; running in float32 on cpu")
    return is_told or line == "head: none, one token at a time"


def test_interrupt_ends_with_one_line(program: list[str], roomy_target_dir: Path) -> None:
    process = start([*program, "generate", "--target", str(roomy_target_dir), *ENDLESS])
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = stderr.decode().splitlines()
    assert lines[-1].startswith("interrupted; ")
    assert all(is_about_loading(line) for line in lines[:-1]), lines


def test_reader_that_leaves_is_no_error(
    warm: WarmPrograms, program: list[str], roomy_target_dir: Path
) -> None:
    command = [*program, "generate", "--target", str(roomy_target_dir), *ENDLESS]
    process = warm.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert all(is_about_loading(line) for line in stderr.splitlines()), stderr


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, warm: WarmPrograms, command: list[str]) -> None:
        self._fd, screen = os.openpty()
        streams = {"stdin": screen, "stdout": screen, "stderr": screen}
        self._process = warm.start(command, env={**os.environ, "TERM": "xterm"}, **streams)
        os.close(screen)
        self._is_over = False

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, *, press: str = "", timeout_s: float = 60.0) -> None:
        """Read until the pattern shows up after what was seen before, pressing a key meanwhile.

        Line editing misses a signal that comes while it is still starting; people press again.
        """
        seen = ""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, seen):
            if time.monotonic() > deadline:
                pytest.fail(f"{pattern!r} did not show up in {seen!r}")
            if press and not seen:
                self.type(press)
            if select.select([self._fd], [], [], 1.0)[0]:
                seen += os.read(self._fd, 4096).decode(errors="replace")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever the test found, its program does not outlive it."""
        if not self._is_over:
            self._process.kill()
            self.wait()

    def wait(self) -> int:
        try:
            while os.read(self._fd, 4096):
                pass
        except OSError:  # the terminal is gone when its program has ended
            pass
        os.close(self._fd)
        self._is_over = True
        return self._process.wait()


def test_chat_on_a_terminal(warm: WarmPrograms, program: list[str], roomy_target_dir: Path) -> None:
    """Ctrl-C stops an answer and keeps the conversation; at the prompt it says how to leave."""
    chat = [*program, "chat", "--target", str(roomy_target_dir), "--max-tokens", "900000"]
    with Terminal(warm, chat) as terminal:
        terminal.wait_for(r"\n> ")
        terminal.type("Hello\n")
        terminal.wait_for(r"Hello\r\n(?s:.{20})")
        terminal.type("\x03")
        terminal.wait_for(r"stopped; the conversation goes on(?s:.*)> ")
        terminal.wait_for(r"Ctrl-D or /quit(?s:.*)> ", press="\x03")
        terminal.type("Hello again\n")
        terminal.wait_for(r"Hello again\r\n(?s:.{20})")
        terminal.type("\x03")
        terminal.wait_for(r"stopped; (?s:.*)> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


@pytest.mark.slow
def test_answer_beyond_the_encoding_of_stdout(program: list[str], target_dir: Path) -> None:
    """The random target speaks in arbitrary bytes; ASCII shows them as question marks."""
    process = subprocess.run(
        [*program, "generate", "--target", str(target_dir), "--prompt", "x", "--max-tokens", "30"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert b"?" in process.stdout
