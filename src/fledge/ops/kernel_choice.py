"""Which way an operation goes: its Triton kernel, or the plain twin beside it.

Kernels run on CUDA by themselves. `FLEDGE_KERNELS=plain` in the environment, or
`with choose_kernels("plain")` in a test, takes the twins everywhere; `"triton"` asks for kernels on
any device, which on a CPU needs Triton's interpreter (`TRITON_INTERPRET=1` before it is imported).
On a CPU in float32 kernels of `ops/native` run by themselves where weights are many; `"native"`
asks for them whatever the size.

A kernel proves itself on the machine it runs on: its first result of each kind is checked against
its twin. One that cannot be built, or is wrong, is said once and left for its twin. Where
`"triton"` was asked for, nothing is checked and nothing replaced.
"""

import importlib.util
import logging
import os
import subprocess
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from fledge.contracts.errors import ConfigError

KernelChoice = Literal["auto", "plain", "triton", "native"]
Result = TypeVar("Result")

_MANY_BYTES = 16_000_000
"""Weights for which it is worth compiling kernels, which takes some seconds once."""

_log = logging.getLogger(__name__)
_chosen: list[KernelChoice] = []
_broken: set[str] = set()
_checked: set[tuple[str, Hashable]] = set()


@contextmanager
def choose_kernels(choice: KernelChoice) -> Iterator[None]:
    """Inside, the given choice holds for every thread of the process."""
    _chosen.append(choice)
    try:
        yield
    finally:
        _chosen.pop()


def uses_kernels(tensor: Tensor) -> bool:
    """Whether operations on this tensor should go through kernels."""
    choice = _choice()
    if choice == "auto":
        return tensor.is_cuda and _has_triton()
    return choice == "triton"


def uses_native(weight: Tensor, num_bytes: int) -> bool:
    """Whether a network of so many bytes like this one should run on the native kernels."""
    choice = _choice()
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return choice == "native" or (choice == "auto" and num_bytes >= _MANY_BYTES)


def is_native_asked_for() -> bool:
    """Whether `"native"` was chosen: then nothing takes the place of what is wrong."""
    return _choice() == "native"


def _choice() -> KernelChoice:
    return _chosen[-1] if _chosen else _choice_of_environment()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Inside, kernels are launched where the tensor is, not where the process happens to be."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def needs_check(name: str, kind: Hashable) -> bool:
    """Whether the next result of a kernel is the first of its kind; asking waits for the device."""
    if _choice() != "auto" or name in _broken or (name, kind) in _checked:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def run_kernel(
    name: str,
    kernel: Callable[[], Result],
    twin: Callable[[], Result],
    *,
    kind: Hashable = None,
    is_right: Callable[[Result], bool] | None = None,
) -> Result:
    """The kernel's result, or its twin's if this machine cannot build it or gets it wrong.

    `kind` tells apart ways in which the kernel is compiled; `is_right` judges the first of each.
    """
    if name in _broken:
        return twin()
    try:
        result = kernel()
    except Exception as error:
        if _choice() == "triton" or not _is_build_failure(error):
            raise
        reason = str(error).strip().splitlines()[:1] or ["no reason given"]
        _give_up(name, f"cannot be built here ({type(error).__name__}: {reason[0]})")
        return twin()
    if is_right is not None and needs_check(name, kind):
        if not is_right(result):
            _give_up(name, "is wrong on this device")
            return twin()
        _checked.add((name, kind))
    return result


def _give_up(name: str, why: str) -> None:
    _broken.add(name)
    message = "the kernel for %s %s; the plain operations take its place and are slower"
    _log.warning(message, name, why)


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
