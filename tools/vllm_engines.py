"""Engines of vLLM that start together and work one at a time, for `compare_vllm.py`.

Starting an engine is the host's work and takes a minute or more; most of it is loading libraries
and compiling. So the libraries are loaded once, every engine is a fork of the process that has
them, and engines compile side by side. While one is measured the others wait in the device's
memory and have nothing to do.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MARGIN = 0.97
"""A chain slower than this share of the best is taken for slower, not for noise."""

_NEEDED_BY_ENGINES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.warmup.kernel_warmup",
)
"""Not the compiler's: FlashInfer, which it loads, starts CUDA."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def load_libraries() -> Any:
    """vLLM, with what its engines would otherwise load one by one after the fork."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams  # noqa: F401  (loaded at first use)

    if torch.cuda.is_available():
        for name in _NEEDED_BY_ENGINES:
            with contextlib.suppress(ImportError):  # other versions call them otherwise
                importlib.import_module(name)
        if torch.cuda.is_initialized():  # forks could not use it, and vLLM would not notice
            say("a library has started CUDA: engines load theirs anew")
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return vllm


class EngineProcess:
    """One engine in a process group of its own; what it prints goes to its log."""

    def __init__(
        self,
        label: str,
        options: Mapping[str, Any],
        measure: Callable[[Any, int], dict[str, Any]],
        log: Path,
    ) -> None:
        self.label, self.log = label, log
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, self._pipe, dict(options), measure, log)
        )
        self._process.start()
        theirs.close()

    def wait(self, timeout_s: float) -> Any:
        """What it found; RuntimeError where it failed, said nothing in time or is gone."""
        try:
            if not self._pipe.poll(max(timeout_s, 0.0)):
                raise RuntimeError(f"nothing came within {timeout_s:.0f} s; {self._last_line()}")
            state, found = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"its process ended; {self._last_line()}") from None
        if state == "failed":
            raise RuntimeError(found)
        return found

    def measure(self, size: int, timeout_s: float) -> dict[str, Any]:
        self._pipe.send(size)
        return dict(self.wait(timeout_s))

    def ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def end(self, timeout_s: float = 10.0) -> None:
        """Gone with all that it started, asked or not."""
        self._process.join(timeout_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join(timeout_s)
        self._pipe.close()

    def _last_line(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{self.log} ends with: {lines[-1][:300]}" if lines else f"{self.log} is empty"


def _work(
    pipe: Connection,
    parents: Connection,
    options: dict[str, Any],
    measure: Callable[[Any, int], dict[str, Any]],
    log: Path,
) -> None:
    os.setsid()
    parents.close()
    with log.open("a", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    import vllm

    try:
        started = time.perf_counter()
        llm = vllm.LLM(**options)
        pipe.send(("ready", time.perf_counter() - started))
        while (size := pipe.recv()) is not None:
            pipe.send(("cell", measure(llm, size)))
        llm.llm_engine.engine_core.shutdown(timeout=1.0)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # where nobody listens any more
            pipe.send(("failed", f"{type(error).__name__}: {error}"[:400]))
    sys.stdout.flush()


def wait_for(gate: Path | None, timeout_s: float) -> float:
    """Hold until somebody makes that file: so long the device may do other things."""
    if gate is None:
        return 0.0
    say(f"ready; waiting for {gate}")
    began = time.perf_counter()
    while not gate.exists() and time.perf_counter() < began + timeout_s:
        time.sleep(0.2)
    say("going on" if gate.exists() else f"{gate} did not come in {timeout_s:.0f} s; going on")
    return time.perf_counter() - began


def cannot_win(chain: int, speeds: Mapping[int, float]) -> int | None:
    """A chain between this one and the best that lost already: this one lies further down."""
    if not speeds:
        return None
    best = max(speeds, key=lambda one: speeds[one])
    for other, speed in speeds.items():
        is_between = min(chain, best) < other < max(chain, best)
        if is_between and speed < MARGIN * speeds[best]:
            return other
    return None
