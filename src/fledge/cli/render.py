"""What the user sees, on stderr unless it is a result: figures, JSON, text safe for a terminal."""

import json
import sys
from typing import Any

from fledge.contracts.outputs import Completion

# Everything that could move the cursor or recolour the screen; line breaks and tabs stay.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def print_json(document: dict[str, Any]) -> None:
    """The one document of `--json`."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(document, ensure_ascii=not is_unicode))


def write_text(text: str) -> None:
    """A piece of an answer on stdout, at once; a terminal never sees a model's control codes."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """Without what could move the cursor or recolour the screen."""
    return text.translate(_CONTROLS)


def say(text: str) -> None:
    """A line for people, dim where the terminal can."""
    is_dim = sys.stderr.isatty()
    print(f"\033[2m{text}\033[0m" if is_dim else text, file=sys.stderr, flush=True)


def figures(completion: Completion) -> str:
    """`42 tokens · 13.1 tokens/s · accept length 2.10 over 20 cycles`"""
    stats = completion.stats
    parts = [count(stats.num_tokens, "token"), f"{stats.tokens_per_s:.1f} tokens/s"]
    if stats.accept_length is not None:
        cycles = count(stats.cycles, "cycle")
        parts.append(f"accept length {stats.accept_length:.2f} over {cycles}")
    if completion.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`"""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shorten(text: str, width: int = 60) -> str:
    """One line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def duration(seconds: float) -> str:
    """`4 s`, `2 min 05 s`, `1 h 02 min`"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
