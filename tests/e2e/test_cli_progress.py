"""Progress on stderr: lines in a log, bars on a terminal, nothing on stdout."""

import io
import logging
import re
import time

import pytest

from fledge.cli import progress
from fledge.cli.log import set_up_logging
from fledge.cli.progress import BarProgress, LineProgress, terminal_progress


def test_lines_state_share_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineProgress(line_every_s=0.0)
    with shown.task("downloading x", 2_000_000) as task:
        task.advance(500_000)
        shown.note("by the way")
        task.update_total(1_000_000)
        task.advance(500_000)
    with shown.task("thinking", unit="steps") as task:
        task.advance(3)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "downloading x (2.0 MB)"
    assert lines[1].startswith("downloading x: 25% of 2.0 MB, ")
    assert lines[1].endswith(" left")
    assert lines[2] == "by the way"
    assert lines[3].startswith("downloading x: 100% of 1.0 MB, ")
    assert lines[4].startswith("downloading x: done in ")
    assert lines[5] == "thinking"
    assert lines[6].startswith("thinking: 3 steps, ")


def test_slow_work_has_a_rate_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 40.0, 42.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with LineProgress().task("asking", 10, unit="rows") as task:
        task.advance(5)
    assert "asking: 50% of 10 rows, 0.12 rows/s, 40 s left\n" in capsys.readouterr().err


def test_a_failed_task_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="broken"), LineProgress().task("working", 5, unit="steps"):
        raise OSError("broken")
    assert capsys.readouterr().err == "working (5 steps)\n"


def test_work_of_which_nothing_is_done_yet_is_heard_of(
    capfd: pytest.CaptureFixture[str],
) -> None:
    heard = ""
    with LineProgress(line_every_s=0.01).task("asking", 10, unit="rows") as task:
        while "asking, 7 tokens: 0 of 10 rows, " not in heard:
            task.update_label("asking, 7 tokens")
            heard += capfd.readouterr().err
    assert re.search(r"^asking, 7 tokens: 0 of 10 rows, \d+ s so far$", heard, re.MULTILINE)
    with LineProgress(line_every_s=0.01).task("loading", unit=""):
        while " so far" not in (heard := capfd.readouterr().err):
            time.sleep(0.01)
    assert "loading: 0 s so far\n" in heard


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = terminal_progress()
    assert isinstance(shown, BarProgress)
    with shown.task("loading y", unit=""), shown.task("downloading x", 1_000_000) as task:
        task.advance(1_000_000)
        shown.note("by the [way]")
    with pytest.raises(KeyboardInterrupt), shown.task("never done", 9):
        raise KeyboardInterrupt
    shown.note("after [all]")
    text = screen.getvalue()
    assert "✓ loading y" in _plain(text)
    assert "1.0 MB of 1.0 MB" in text
    assert "by the [way]" in text
    assert "after [all]" in text


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_the_first_of_many_rows_promises_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 120.0, 700.0, 701.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with LineProgress().task("asking", 100, unit="rows") as task:
        task.advance(1)
        task.advance(1)
    shown = capsys.readouterr().err
    assert "asking: 1% of 100 rows, 0.0083 rows/s\n" in shown
    assert "asking: 2% of 100 rows, 0.0029 rows/s, 9 h 31 min left\n" in shown


def test_long_work_without_progress_is_news(capsys: pytest.CaptureFixture[str]) -> None:
    compiling = logging.getLogger("fledge.ops.native_library")
    set_up_logging(debug=False)
    compiling.info("compiling")
    logging.getLogger("fledge.engine").info("nothing that a user must know")
    compiling.warning("slow")
    assert capsys.readouterr().err == "compiling\nWARNING fledge.ops.native_library: slow\n"
