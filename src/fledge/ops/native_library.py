"""The kernels of `ops/native`, compiled on the machine that runs them.

One C++ file and the headers it includes, compiled once with the machine's own compiler for its own
processor, and kept in the cache under a name made of sources, compiler, flags and processor. It is
called through ctypes with plain pointers, so neither Python's nor torch's headers are needed. It
uses the OpenMP runtime that torch has loaded: there is one pool of threads. Where there is no
compiler, or what it made does not compute what it should, plain operations take its place.
"""

import ctypes
import hashlib
import logging
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from fledge.store.cache import CacheLayout, default_cache_dir
from fledge.store.compiler import COMPILERS, find_compiler

_SOURCES = Path(__file__).parent / "native"
_MAIN = "decoder.cpp"
# Sums of whole numbers overflow on the way to results that have room: -fwrapv says that they may.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fwrapv", "-fPIC", "-shared", "-w")
_MOST_SECONDS = 300
_log = logging.getLogger(__name__)


class NoNativeKernelsError(Exception):
    """The kernels cannot be had here; the message says why."""


class NativeLibrary:
    """The functions of the compiled library."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.pack = loaded.fledge_pack
        self.pack.argtypes = [pointer, *[number] * 4, pointer, pointer, number]
        self.multiply = loaded.fledge_multiply
        self.multiply.argtypes = [pointer, pointer, number, number, pointer, number, number]
        self.best = loaded.fledge_best
        self.best.argtypes = [pointer, pointer, number, number, pointer, number]
        self.run_pass = loaded.fledge_pass
        self.run_pass.argtypes = [pointer, pointer, number]
        self.run_step = loaded.fledge_step
        self.run_step.argtypes = [pointer, pointer, number]
        self.run_chain = loaded.fledge_chain
        self.run_chain.argtypes = [pointer, pointer, number]
        self.run_walk = loaded.fledge_walk
        self.run_walk.argtypes = [pointer, number]
        for function in (
            self.pack,
            self.multiply,
            self.best,
            self.run_pass,
            self.run_step,
            self.run_chain,
            self.run_walk,
        ):
            function.restype = number


@cache
def native_library() -> NativeLibrary:
    """The library, compiled if it is not in the cache; raises where it cannot be had."""
    try:
        return NativeLibrary(_ensure_built())
    except (OSError, AttributeError) as error:
        raise NoNativeKernelsError(f"the compiled kernels cannot be loaded ({error})") from error


def _ensure_built() -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise NoNativeKernelsError(
            f"there is no C++ compiler ({', '.join(COMPILERS)}, or another one named by CXX)"
        )
    command = [compiler, *_FLAGS, *_processor_flags(), *_openmp_flags(compiler)]
    path = CacheLayout(default_cache_dir()).native / f"{_key(command)}.so"
    if not path.is_file():
        _build(command, path)
    return path


def _processor_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def _openmp_flags(compiler: str) -> tuple[str, ...]:
    """The runtime torch has loaded, by its path: a second one would have threads of its own."""
    if "clang" in Path(compiler).name:
        return ("-fopenmp",)
    folder = Path(torch.__file__).parent
    for place in (folder / "lib", folder.parent / "torch.libs"):
        for library in sorted(place.glob("libgomp*.so*")):
            return ("-fopenmp", str(library))
    return ("-fopenmp",)


def _key(command: list[str]) -> str:
    """A name for what this command makes of these sources on this processor."""
    version = _run([command[0], "--version"]).splitlines()[:1]
    parts = [*command, *version, *_processor(), torch.__version__]
    sources = [path.read_bytes() for path in sorted(_SOURCES.iterdir()) if path.is_file()]
    return hashlib.sha256(b"\0".join([*(one.encode() for one in parts), *sources])).hexdigest()[:32]


def _processor() -> Iterator[str]:
    """Name and features of the processor: a home directory may be shared by several machines."""
    yield platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        yield platform.processor()
        return
    for name in ("model name", "flags", "Features"):
        yield next((line for line in lines if line.startswith(name)), "")


def _build(command: list[str], path: Path) -> None:
    _log.info("compiling kernels for this processor, the first time only")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _run([command[0], str(_SOURCES / _MAIN), *command[1:], "-o", str(made)])
            # Whoever else is compiling the same makes the same file.
            made.replace(path)
    except OSError as error:
        raise NoNativeKernelsError(
            f"compiled kernels cannot be kept in {path.parent} ({error})"
        ) from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_MOST_SECONDS
        )
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), "no reason")
        raise NoNativeKernelsError(f"{command[0]} cannot compile them ({first.strip()})") from error
    except subprocess.TimeoutExpired as error:
        raise NoNativeKernelsError(f"{command[0]} did not end in {_MOST_SECONDS} s") from error
    return done.stdout
