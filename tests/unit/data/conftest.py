"""Where the real data files are; tests that need them skip with a reason when they are absent.

And what tests of `tokenize` have in common: a target and answers, new in every file of tests.
"""

import os
from pathlib import Path

import pytest

from tests.unit.data.tokenize_support import many_rows, save_target, write_source


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with `train/` and `bench/`: $FLEDGE_SHARED_DATA, $FLEDGE_DATA, ../shared/data."""
    default = Path(__file__).parents[4] / "shared" / "data"
    named = os.environ.get("FLEDGE_SHARED_DATA") or os.environ.get("FLEDGE_DATA")
    directory = Path(named) if named else default
    if not (directory / "train").is_dir():
        pytest.skip(f"no data files in {directory}; set FLEDGE_SHARED_DATA to a folder with them")
    return directory


@pytest.fixture(scope="session")
def train_data(shared_data: Path) -> Path:
    """The real files of prompts."""
    return shared_data / "train"


@pytest.fixture(scope="session")
def bench_data(shared_data: Path) -> Path:
    """The real files of benchmark prompts."""
    return shared_data / "bench"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("targets") / "chatml")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("answers") / "many", many_rows(60))
