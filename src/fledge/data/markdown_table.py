"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def render_table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1) -> str:
    """A table whose first `num_left` columns are texts and whose others are numbers."""
    rule = ["---" if place < num_left else "--:" for place in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
