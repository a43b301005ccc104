"""What moves while the demo runs: the two answers on a terminal, a count of answers elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fledge.cli.demo_contest import TURNS, Contest, OnPiece, Round, describe_round
from fledge.cli.demo_page import answer_lines, prompt_lines, question_lines, show
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count

if TYPE_CHECKING:
    from rich.console import Console, Group

_REFRESH_S = 0.25
"""Drawing takes time from the answers; this is seldom enough not to matter."""

_AGAIN = len(TURNS) // 2


def run_quietly(contest: Contest, prompts: Sequence[str]) -> list[Round]:
    """Answer all prompts with nothing on stdout."""
    with terminal_progress().task("answering", len(prompts) * len(TURNS), "answers") as task:
        rounds = []
        for prompt in prompts:
            rounds.append(contest.ask(prompt, lambda number, piece: None))
            task.advance(len(TURNS))
        return rounds


def run_visibly(contest: Contest, prompts: Sequence[str], console: "Console") -> list[Round]:
    """Answer all prompts, and print each with its figures as soon as they are there."""
    rounds: list[Round] = []
    for number, prompt in enumerate(prompts):
        with _watching(console, prompt, number, len(prompts)) as on_piece:
            rounds.append(contest.ask(prompt, on_piece))
        show(console, [*prompt_lines(describe_round(rounds[-1]), number), ""])
    return rounds


@contextmanager
def _watching(console: "Console", prompt: str, number: int, total: int) -> Iterator[OnPiece]:
    if not console.is_terminal:
        # The page goes elsewhere; a line tells the terminal, or a log, that something happens.
        label = f"prompt {number + 1} of {total}"
        with terminal_progress().task(label, len(TURNS), "answers") as task:
            yield _counting(task.advance)
        return
    from rich.live import Live

    view = _View(prompt, number)
    with Live(view.render(), console=console, auto_refresh=False, transient=True) as live:

        def draw(turn: int, piece: str) -> None:
            if view.add(turn, piece):
                live.update(view.render(), refresh=True)

        yield draw


def _counting(advance: Callable[[int], None]) -> OnPiece:
    newest = 0

    def notice(turn: int, piece: str) -> None:
        nonlocal newest
        del piece
        if turn > newest:
            advance(turn - newest)
            newest = turn

    return notice


class _View:
    """A prompt and its two answers as far as they are made."""

    def __init__(self, prompt: str, number: int) -> None:
        self._prompt, self._number = prompt, number
        self._texts = [""] * len(TURNS)
        self._turn = 0
        self._drawn = 0.0

    def add(self, turn: int, piece: str) -> bool:
        """Whether it is time to draw again."""
        self._turn = turn
        self._texts[turn] += piece
        now = time.monotonic()
        if now - self._drawn < _REFRESH_S:
            return False
        self._drawn = now
        return True

    def render(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        status = f"answering {TURNS[self._turn]} the head"
        if self._turn >= _AGAIN:
            words = count(len(self._texts[self._turn].split()), "word")
            status += f", again, in the other order ({words})"
        return Group(
            *question_lines(self._prompt, self._number),
            *answer_lines(*self._texts[:_AGAIN]),
            Text(f"   {status} ...", style="dim"),
        )
