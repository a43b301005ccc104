"""Which way operations go: kernels where they can run, twins where they cannot or are asked for."""

import logging
from collections.abc import Iterator

import pytest
import torch

from fledge.contracts.errors import ConfigError
from fledge.ops import kernel_choice
from fledge.ops.kernel_choice import choose_kernels, needs_check, run_kernel, uses_kernels


@pytest.fixture(autouse=True)
def _nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_broken", set())
    monkeypatch.setattr(kernel_choice, "_checked", set())


def cannot_be_built() -> str:
    raise FileNotFoundError("no compiler here")


def test_on_a_cpu_twins_are_taken_unless_kernels_are_asked_for() -> None:
    here = torch.zeros(1)
    assert not uses_kernels(here)
    with choose_kernels("triton"):
        assert uses_kernels(here)
        with choose_kernels("plain"):
            assert not uses_kernels(here)
        assert uses_kernels(here)
    assert not uses_kernels(here)


def test_a_kernel_that_cannot_be_built_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert run_kernel("adding", cannot_be_built, lambda: "plain") == "plain"
    (record,) = caplog.records
    assert "the kernel for adding cannot be built here" in record.getMessage()
    assert "no compiler here" in record.getMessage()
    assert run_kernel("another", lambda: "fused", lambda: "plain") == "fused"


def test_the_first_result_of_each_kind_is_checked() -> None:
    judged = []

    def run(kind: int, answer: str) -> str:
        def is_right(result: str) -> bool:
            judged.append((kind, result))
            return result == "right"

        return run_kernel("adding", lambda: answer, lambda: "plain", kind=kind, is_right=is_right)

    assert needs_check("adding", 1)
    assert run(1, "right") == "right"
    assert not needs_check("adding", 1)
    assert run(1, "unseen") == "unseen"
    assert run(2, "right") == "right"
    assert judged == [(1, "right"), (2, "right")]


def test_a_kernel_that_is_wrong_is_said_once_and_left(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> str:
        return run_kernel("adding", lambda: "no", lambda: "plain", is_right=lambda _: False)

    with caplog.at_level(logging.WARNING):
        assert [run() for _ in range(3)] == ["plain"] * 3
    (record,) = caplog.records
    assert "the kernel for adding is wrong on this device" in record.getMessage()
    assert not needs_check("adding", None)


def test_nothing_is_checked_where_kernels_were_asked_for() -> None:
    with choose_kernels("triton"):
        assert not needs_check("adding", None)
        assert run_kernel("adding", lambda: 1, lambda: 2, is_right=lambda _: False) == 1


def test_a_kernel_that_was_asked_for_must_not_be_replaced() -> None:
    with choose_kernels("triton"), pytest.raises(FileNotFoundError, match="no compiler here"):
        run_kernel("adding", cannot_be_built, lambda: "plain")


def test_a_kernel_that_fails_while_it_runs_is_no_matter_of_building() -> None:
    def fails() -> str:
        raise RuntimeError("device-side assert")

    with pytest.raises(RuntimeError, match="device-side assert"):
        run_kernel("adding", fails, lambda: "plain")


def test_errors_of_triton_and_a_missing_compiler_count_as_building() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def too_large() -> str:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    def no_compiler() -> str:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    assert run_kernel("one", too_large, lambda: "plain") == "plain"
    assert run_kernel("two", no_compiler, lambda: "plain") == "plain"


@pytest.fixture
def _environment_is_asked_again() -> Iterator[None]:
    kernel_choice._choice_of_environment.cache_clear()
    yield
    kernel_choice._choice_of_environment.cache_clear()


@pytest.mark.usefixtures("_environment_is_asked_again")
@pytest.mark.parametrize(("choice", "expected"), [("plain", False), ("triton", True)])
def test_the_environment_chooses_for_a_whole_process(
    choice: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_KERNELS", choice)
    assert uses_kernels(torch.zeros(1)) is expected


@pytest.mark.usefixtures("_environment_is_asked_again")
def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_KERNELS", "fast")
    message = "FLEDGE_KERNELS is 'fast', but must be one of auto, plain, triton, native. Set it"
    with pytest.raises(ConfigError, match=message):
        uses_kernels(torch.zeros(1))
