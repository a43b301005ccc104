"""What the demo shows: answers side by side, speeds as bars; made from the demo's document alone.

Lines fit a terminal of 80 columns. Colours say nothing that the words do not.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fledge.cli.render import count, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 80
_INDENT = "   "
_GAP = "  "
_COLUMN = (WIDTH - len(_INDENT) - len(_GAP)) // 2
_BAR = 30
_WITHOUT, _WITH = "without a head", "with the head"
_STYLES = {_WITHOUT: "yellow", _WITH: "green"}


def make_console() -> "Console":
    """stdout as rich sees it, at most as wide as the page."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if console.width > WIDTH or not console.is_terminal:
        console.width = WIDTH
    return console


def page_text(document: Mapping[str, Any]) -> str:
    """The whole page without colours, as a pipe sees it."""
    entries = list(enumerate(document["prompts"]))
    return _plain([*intro_lines(document), _text("")]) + _results(document, entries)


def tail_text(document: Mapping[str, Any]) -> str:
    """The end of the page: the last prompt, and what it all comes to."""
    return _results(document, list(enumerate(document["prompts"]))[-1:])


def _results(document: Mapping[str, Any], entries: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    made = [_plain([*prompt_lines(entry, number), _text("")]) for number, entry in entries]
    return "".join([*made, _plain(summary_lines(document))])


def _plain(lines: "Sequence[Text]") -> str:
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def show(console: "Console", lines: "Sequence[str | Text]") -> None:
    """Print lines as they are: none is wrapped twice, none is searched for markup."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def intro_lines(document: Mapping[str, Any]) -> "list[Text]":
    """What is about to happen."""
    prompts = count(document["num_prompts"], "prompt")
    return [
        _text(f"{document['target']}, {document['dtype']} on {document['device']}", "bold"),
        _text(
            f"{prompts}, greedy, at most {document['max_tokens']} tokens; each answered without "
            "the head, with it,"
        ),
        _text("with it and without it, so that neither side gains by the order."),
    ]


def prompt_lines(entry: Mapping[str, Any], number: int) -> "list[Text]":
    """A prompt, both answers and their speeds."""
    plain, drafted = entry["text"], entry.get("text_with_head", entry["text"])
    lines = [*question_lines(entry["prompt"], number), *answer_lines(plain, drafted), _text("")]
    lines += _bars(entry, indent=_INDENT)
    if not entry["outputs_identical"]:
        place = entry["first_different_token"] + 1
        lines.append(_text(f"{_INDENT}DIFFERENT from token {place} on", "bold red"))
    return lines


def question_lines(prompt: str, number: int) -> "list[Text]":
    wrapped = _wrapped(prompt, WIDTH - len(_INDENT))
    marks = [f"{number + 1}. ", *[_INDENT] * (len(wrapped) - 1)]
    return [_text(mark + line, "bold") for mark, line in zip(marks, wrapped, strict=True)]


def answer_lines(plain: str, drafted: str) -> "list[Text]":
    """Two columns; while the second answer is made it is shorter than the first."""
    left, right = _wrapped(plain, _COLUMN), _wrapped(drafted, _COLUMN)
    height = max(len(left), len(right))
    left, right = (column + [""] * (height - len(column)) for column in (left, right))
    heads = _row(_text(_WITHOUT, _STYLES[_WITHOUT]), _text(_WITH, _STYLES[_WITH]))
    return [heads, *(_row(_text(a), _text(b)) for a, b in zip(left, right, strict=True))]


def summary_lines(document: Mapping[str, Any]) -> "list[Text]":
    """What it comes to."""
    same = sum(entry["outputs_identical"] for entry in document["prompts"])
    verdict = f"Same text, token for token: {same} of {count(document['num_prompts'], 'prompt')}."
    length = document["accept_length"]
    pace = "" if length is None else f", {length:.2f} tokens a pass of the target (accept length)"
    return [
        _text(verdict, "bold" if document["outputs_identical"] else "bold red"),
        _text(""),
        *_bars(document),
        _text(""),
        _text(f"{document['speedup']:.2f} times as fast{pace}", "bold"),
    ]


def _bars(figures: Mapping[str, Any], indent: str = "") -> "list[Text]":
    from rich.text import Text

    speeds = {
        _WITHOUT: figures["baseline_tokens_per_s"],
        _WITH: figures["speculative_tokens_per_s"],
    }
    most = max(speeds.values()) or 1.0
    full, empty = _bar_characters()
    lines = []
    for name, speed in speeds.items():
        filled = max(1, round(_BAR * speed / most))
        line = Text(f"{indent}{name:<{len(_WITHOUT)}}  ")
        line.append(full * filled, style=_STYLES[name])
        line.append(f"{empty * (_BAR - filled)}  {speed:6.1f} tokens/s")
        lines.append(line)
    if figures["speedup"] is not None:
        lines[-1].append(f"  {figures['speedup']:.2f}x")
    return lines


def _bar_characters() -> tuple[str, str]:
    """Blocks where the output can show them."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "█".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "#", " "
    return "█", " "


def _row(left: "Text", right: "Text") -> "Text":
    from rich.text import Text

    left.pad_right(_COLUMN - left.cell_len)
    return Text.assemble(_INDENT, left, _GAP, right)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many cells, at words where that is possible; its own line breaks stay."""
    from rich.console import Console
    from rich.text import Text

    # Wrapping asks a console for its width of a tab only.
    console = Console(file=io.StringIO(), width=width)
    clean = printable(text).expandtabs(4).strip("\n")
    wrapped = Text(clean).wrap(console, width)
    return [line.plain.rstrip() for line in wrapped] or [""]


def _text(line: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(line, style=style)
