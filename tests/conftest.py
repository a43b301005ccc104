"""Fixtures over fledge.testing; nothing here is downloaded.

Benchmark files are looked for in $FLEDGE_DATA, then in ../shared/data beside the repository; tests
that need them skip with a reason when they are absent.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

# A run started in the background may ignore Ctrl-C, and so would every program it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny networks run faster on one thread, and the sums always have the same order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    default = Path(__file__).parents[2] / "shared" / "data"
    directory = Path(os.environ.get("FLEDGE_DATA", default))
    if not directory.is_dir():
        pytest.skip(f"no benchmark files in {directory}; set FLEDGE_DATA to a folder that has them")
    return directory
