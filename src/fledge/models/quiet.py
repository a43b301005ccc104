"""Keeps transformers silent while it works, and short when it fails: our own messages matter."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars, no log lines, no warnings; everything is as before afterwards."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    bar = getattr(modeling_gguf_pytorch_utils, "tqdm", None)
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    # This one bar does not ask whether bars are wanted.
    modeling_gguf_pytorch_utils.tqdm = _without_bar
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _without_bar(items: Iterable[Any], *_: object, **__: object) -> Iterable[Any]:
    return items


def first_line(error: Exception) -> str:
    """What an error says in one line, for the end of a message of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # transformers' validators name the field in the first line and the value in the second.
    return " ".join(line.strip() for line in (lines[:2] if lines[0].endswith(":") else lines[:1]))
