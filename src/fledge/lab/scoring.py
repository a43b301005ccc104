"""Whether an answer is right: the last number of GSM8K, a function of HumanEval that passes.

Scores show that a head changes nothing; they are not meant to rank targets.
"""

import re
from collections.abc import Iterable

from fledge.lab.sandbox import NoSandboxError, passes
from fledge.lab.suite_prompts import Check, NumberCheck, ProgramCheck
from fledge.lab.suite_rows import last_number

_BLOCK = re.compile(r"```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_GOES_ON = re.compile(r"\s|def |class |import |from |@|#|\)|\]|\}")
"""Beginnings of lines that may belong to a function or stand between functions."""


class Scorer:
    """Checks answers, each different one once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Check, str], bool] = {}
        self.problem: str | None = None
        """Why programs could not be run, where that is so."""

    def score(self, check: Check, text: str) -> bool | None:
        """Right or wrong; None where it cannot be known here."""
        if isinstance(check, NumberCheck):
            return last_number(text) == check.number
        if self.problem is not None:
            return None
        key = (check, text)
        if key not in self._known:
            try:
                self._known[key] = passes(program_of(check, text))
            except NoSandboxError as error:
                self.problem = str(error)
                return None
        return self._known[key]


def program_of(check: ProgramCheck, text: str) -> str:
    """The function of an answer, with its test."""
    return f"{_function(check, text)}\n\n{check.test}\n\ncheck({check.entry_point})\n"


def _function(check: ProgramCheck, text: str) -> str:
    """A code block that defines the function; else the text from there on; else its body."""
    before, _, _ = check.stub.partition(f"def {check.entry_point}")
    beginning = f"def {check.entry_point}"
    blocks = _BLOCK.findall(text)
    for block in blocks:
        if beginning in block:
            return before + str(block)
    if beginning in text:
        lines = text[text.index(beginning) :].splitlines()
        return before + "\n".join(_function_lines(lines))
    body = next((block for block in blocks if block.startswith((" ", "\t"))), text)
    lines = check.stub.rstrip("\n").splitlines()
    return "\n".join([*lines, *_indented_lines(body.splitlines())])


def _function_lines(lines: list[str]) -> Iterable[str]:
    """A function and those around it, up to where prose begins."""
    for line in lines:
        if line.strip() and not _GOES_ON.match(line):
            return
        yield line


def _indented_lines(lines: list[str]) -> Iterable[str]:
    """The body of a function, up to the first line that stands at its margin."""
    for line in lines:
        if line.strip() and not line[0].isspace():
            return
        yield line
