"""Which way an operation goes: its Triton kernel, or the plain twin beside it.

Kernels run on CUDA by themselves. `FLEDGE_KERNELS=plain` in the environment, or
`with choose_kernels("plain")` in a test, takes the twins everywhere; `"triton"` asks for kernels on
any device, which on a CPU needs Triton's interpreter (`TRITON_INTERPRET=1` before it is imported).

A kernel that cannot be built on this machine is said once and left for its twin, unless `"triton"`
was asked for.
"""

import importlib.util
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, TypeVar, cast, get_args

from torch import Tensor

from fledge.contracts.errors import ConfigError

KernelChoice = Literal["auto", "plain", "triton"]
Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_chosen: list[KernelChoice] = []
_broken: set[str] = set()


@contextmanager
def choose_kernels(choice: KernelChoice) -> Iterator[None]:
    """Inside, the given choice holds for every thread of the process."""
    _chosen.append(choice)
    try:
        yield
    finally:
        _chosen.pop()


def uses_kernels(tensor: Tensor, *, is_proven: bool = True) -> bool:
    """Whether operations on this tensor should go through kernels.

    A kernel that was never run on a device beside its twin is not proven: it must be asked for.
    """
    choice = _choice()
    if choice == "auto":
        return is_proven and tensor.is_cuda and _has_triton()
    return choice == "triton"


def _choice() -> KernelChoice:
    return _chosen[-1] if _chosen else _choice_of_environment()


def run_kernel(name: str, kernel: Callable[[], Result], twin: Callable[[], Result]) -> Result:
    """The kernel's result, or its twin's if this machine cannot build the kernel."""
    if name in _broken:
        return twin()
    try:
        return kernel()
    except Exception as error:
        if _choice() == "triton" or not _is_build_failure(error):
            raise
        _broken.add(name)
        _log.warning(
            "the kernel for %s cannot be built here (%s: %s); the plain operations take its place "
            "and are slower",
            name,
            type(error).__name__,
            str(error).strip().splitlines()[0] if str(error).strip() else "no reason given",
        )
        return twin()


def _is_build_failure(error: Exception) -> bool:
    """Failures while a kernel is made, before it has run: nothing was computed or written."""
    if isinstance(error, ImportError | FileNotFoundError | subprocess.CalledProcessError):
        return True
    if any(one.__module__.startswith("triton") for one in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "C compiler" in str(error)


@cache
def _has_triton() -> bool:
    has_it = importlib.util.find_spec("triton") is not None
    if not has_it:
        _log.warning("Triton is not installed: plain operations take the place of kernels")
    return has_it


@cache
def _choice_of_environment() -> KernelChoice:
    choice = os.environ.get("FLEDGE_KERNELS", "auto")
    if choice not in get_args(KernelChoice):
        raise ConfigError(
            f"FLEDGE_KERNELS is {choice!r}, but must be one of "
            f"{', '.join(get_args(KernelChoice))}. Set it to one of them, or leave it unset."
        )
    return cast(KernelChoice, choice)
