"""The prompts a user gave, checked before anything slow starts."""

import sys
from collections.abc import Sequence

from fledge.contracts.errors import RequestError

_STDIN = "-"


def read_prompts(typed: Sequence[str], *, raw: bool) -> list[str]:
    """Prompts in order; `-` is everything on stdin, less the line break that ends it."""
    if typed.count(_STDIN) > 1:
        raise RequestError("`--prompt -` is given twice; stdin can be read only once.")
    prompts = [_read_stdin() if text == _STDIN else text for text in typed]
    for number, prompt in enumerate(prompts, start=1):
        _check(prompt, f"prompt {number}" if len(prompts) > 1 else "the prompt", raw=raw)
    return prompts


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not text in {error.encoding}: {error.reason}.") from error


def _check(prompt: str, name: str, *, raw: bool) -> None:
    if not (prompt if raw else prompt.strip()):
        raise RequestError(f"{name} is empty; give some text after --prompt, or - for stdin.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid UTF-8 text.") from None
