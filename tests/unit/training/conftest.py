"""A tiny target, random samples for it, and their features: made once."""

from pathlib import Path

import pytest

from fledge.testing import save_tiny_target
from tests.unit.features.capture_support import random_samples, run_capture, save_corpus
from tests.unit.training.train_support import EXACT, LENGTHS


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="session")
def tiny_target(folder: Path) -> Path:
    return save_tiny_target(folder / "tiny")


@pytest.fixture(scope="session")
def tiny_corpus(folder: Path, tiny_target: Path) -> Path:
    return save_corpus(folder / "corpus", tiny_target, random_samples(LENGTHS))


@pytest.fixture(scope="session")
def tiny_features(folder: Path, tiny_target: Path, tiny_corpus: Path) -> Path:
    """As the target computed them."""
    run_capture(tiny_corpus, tiny_target, folder / "features", EXACT)
    return folder / "features"
