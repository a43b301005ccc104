"""Fixtures over fledge.testing; nothing here is downloaded.

Benchmark files are looked for in $FLEDGE_DATA, then in ../shared/data beside the repository; tests
that need them skip with a reason when they are absent.
"""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

# Programs that tests start share few cores: threads that wait for each other would only slow them.
# It counts for what is imported from here on.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.warm_programs import WarmPrograms

# A run started in the background may ignore Ctrl-C, and so would every program it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, kernels run in Triton's interpreter, which must be chosen before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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


@pytest.fixture(scope="session")
def language_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that has something to say, trained once for all processes of a test run."""
    # Most tests need none of this, and importing it takes seconds.
    from fledge.testing_language import save_language_target

    return _made_once(tmp_path_factory, "language-target", save_language_target)


@pytest.fixture(scope="session")
def language_corpus(tmp_path_factory: pytest.TempPathFactory, language_target: Path) -> Path:
    """240 greedy answers of that target, as `fledge tokenize` leaves them."""
    from fledge.testing_language import save_language_corpus

    def make(place: Path) -> None:
        save_language_corpus(place, language_target, num_prompts=240)

    return _made_once(tmp_path_factory, "language-data", make) / "corpus"


@pytest.fixture(scope="session")
def language_run(
    tmp_path_factory: pytest.TempPathFactory, language_target: Path, language_corpus: Path
) -> Path:
    """A run of `fledge train` on them, with two checkpoints: a poor head and a fair one."""
    from fledge.contracts.capture_settings import CaptureSettings
    from fledge.contracts.train_settings import HeldOutSettings, OptimizerSettings, TrainSettings
    from fledge.training.stage import train
    from fledge.training.train_input import open_input

    settings = TrainSettings(
        max_steps=28,
        batch_tokens=512,
        micro_tokens=512,
        optimizer=OptimizerSettings(learning_rate=1e-2),
        held_out=HeldOutSettings(share=0.05, every=14, decode_prompts=0),
    )

    def make(place: Path) -> None:
        given = open_input(
            features=None,
            corpora=[language_corpus],
            target=str(language_target),
            settings=settings,
            capture=CaptureSettings(layers=(1, 2, 3)),
            is_capture_asked=True,
            device=torch.device("cpu"),
        )
        train(given, settings, place, has_plots=False)

    return _made_once(tmp_path_factory, "language-run", make)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> WarmPrograms:
    """Starts programs that need not import torch and transformers first."""
    keeper = os.getppid() if _is_worker() else os.getpid()
    return WarmPrograms(_shared(tmp_path_factory), keeper)


def _made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """A directory that all workers of a test run share; whoever comes first makes it."""
    shared = _shared(tmp_path_factory)
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / f"{name}.done"
        if not done.exists():
            make(shared / name)
            done.touch()
    return shared / name


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if _is_worker() else base


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ
