"""What every download from the Hugging Face hub shares: silence, progress, plain words."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from fledge.contracts.progress import Progress

HUB_TIMEOUT_S = 10.0
_POLL_S = 0.2


def first_line(error: BaseException) -> str:
    """What went wrong below, in one line with the error's own name."""
    cause = error.__cause__ or error
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0].rstrip(".")
    return f"{type(cause).__name__}: {reason}"


@contextmanager
def silent_bars() -> Iterator[None]:
    """No bars of huggingface_hub's own meanwhile."""
    was_silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_silent:
            enable_progress_bars()


@contextmanager
def shown_growth(
    label: str, total: int, folder: Path, progress: Progress, *, since: int = 0
) -> Iterator[None]:
    """Report how a folder grows beyond `since` bytes while the block runs."""
    done = threading.Event()
    with progress.task(label, total) as task:

        def watch() -> None:
            seen = since
            while not done.wait(_POLL_S):
                size = folder_bytes(folder)
                if size > seen:
                    task.advance(size - seen)
                    seen = size

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def folder_bytes(folder: Path) -> int:
    """Size of the files in a folder that may be changing."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # renamed since it was listed
    return total
