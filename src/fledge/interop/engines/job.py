"""Prompts answered by another engine, in a process of that engine's own Python.

A job is a file with runs, and so is the result. Token ids go in and come out, so that tokenizers
and chat templates cannot make a difference:

    {"runs": [{"target", "head", "depth", "prompts", "sampling", ...}], "turn"}
    {"version", "runs": [{"answers": [{"token_ids", "finish_reason"}], "num_drafts",
                          "accepted_at_position", "counting", "cycles", "seconds", ...}]}
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.contracts.errors import EngineError
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import TreeSettings
from fledge.interop.engines.acceptance import Acceptance
from fledge.interop.engines.installation import InstalledEngine, engine_title

_ENVIRONMENTS: dict[str, dict[str, str]] = {
    # One process; a CPU without GPU has little memory for a cache, and shares its cores.
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    },
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_LINES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """Prompts for one target with one head, or without."""

    target: Path
    """A directory, or a GGUF file for llama.cpp; `head` likewise."""

    head: Path | None
    tree: TreeSettings
    """Engines that draft chains take its depth."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    dtype: str
    max_model_len: int
    max_requests: int = 32
    group_size: int | None = None
    """Prompts answered together, group after group; None answers all at once. llama.cpp and
    OpenVINO answer one after the other."""

    memory_share: float = 0.6
    """Of a GPU, for engines that take their memory beforehand."""

    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Handed to vLLM's or SGLang's engine as they are; llama.cpp takes `p_min`, the probability
    below which it drafts no further."""

    def as_json(self) -> dict[str, Any]:
        params = self.params
        return {
            "target": str(self.target),
            "head": str(self.head) if self.head is not None else None,
            "depth": self.tree.depth,
            "width": self.tree.width,
            "num_nodes": self.tree.num_nodes,
            "prompts": [list(prompt) for prompt in self.prompts],
            "eos_token_ids": list(self.eos_token_ids),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_requests": self.max_requests,
            "group_size": self.group_size,
            "memory_share": self.memory_share,
            "engine_options": dict(self.engine_options),
            "sampling": {
                "max_tokens": params.max_tokens,
                "min_tokens": params.min_tokens,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "logit_bias": dict(params.logit_bias),
                "repetition_penalty": params.repetition_penalty or 1.0,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                "seed": None if params.is_greedy else params.seed,
                "stop": list(params.stop),
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": params.ignore_eos,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswers:
    """What the engine said, and what it counted meanwhile."""

    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    acceptance: Acceptance
    cycles: int
    """Passes of the target that checked drafts, of all answers."""

    seconds: float
    decoding_seconds: float | None = None
    """Without the prompts, where the engine says so."""

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by decode cycles over cycles; the first of an answer is the prompt's."""
        emitted = self.num_tokens - len(self.token_ids)
        return emitted / self.cycles if self.cycles else None


def run_in_engine(
    engine: InstalledEngine,
    runs: Sequence[EngineRun],
    *,
    timeout_s: float | None = None,
    keep_in: Path | None = None,
    turn: Path | None = None,
) -> list[EngineAnswers]:
    """Answer all prompts of all runs; loading an engine's libraries is paid once.

    `keep_in` keeps job, result and log, which can be read while the engine works. Engines that are
    given the same file as their `turn` start side by side and answer one after the other.
    """
    runner = Path(__file__).parent / f"{engine.name}_runner.py"
    with tempfile.TemporaryDirectory(prefix="fledge-engine-") as passing:
        folder = keep_in.absolute() if keep_in is not None else Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        job, result, log = (folder / name for name in ("job.json", "result.json", "log"))
        result.unlink(missing_ok=True)
        asked = {
            "runs": [run.as_json() for run in runs],
            "turn": str(turn.absolute()) if turn is not None else None,
        }
        job.write_text(json.dumps(asked), encoding="utf-8")
        command = [str(engine.python), str(runner), str(job), str(result)]
        with log.open("wb") as stream:
            _wait(engine, command, stream, timeout_s, str(folder))
        found = json.loads(result.read_text(encoding="utf-8"))["runs"] if result.is_file() else []
        if not result.is_file() or len(found) < len(runs):
            raise EngineError(
                f"{engine_title(engine.name)} {engine.version} failed: {_last_lines(log)}"
            )
    return [_answers(one) for one in found]


def _wait(
    engine: InstalledEngine, command: list[str], log: Any, timeout_s: float | None, folder: str
) -> None:
    # What the user has set goes before what usually does.
    environment = {**_ENVIRONMENTS.get(engine.name, {}), **os.environ, **_OFFLINE}
    if engine.python != Path(sys.executable):
        # Another Python has libraries of its own, and ours would only disturb them.
        environment.pop("PYTHONPATH", None)
    # A session of its own: engines start processes that would outlive their parent.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{engine_title(engine.name)} did not answer within {timeout_s:g} seconds."
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(log: Path) -> str:
    """What an engine said last: usually the name of its error."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LINES_SHOWN:]) or "it said nothing"


def _answers(found: dict[str, Any]) -> EngineAnswers:
    answers = found["answers"]
    return EngineAnswers(
        token_ids=tuple(tuple(answer["token_ids"]) for answer in answers),
        finish_reasons=tuple(answer["finish_reason"] for answer in answers),
        acceptance=Acceptance(
            num_drafts=found["num_drafts"],
            accepted_at_position=tuple(found["accepted_at_position"]),
            counting=found["counting"],
        ),
        cycles=found["cycles"],
        seconds=found["seconds"],
        decoding_seconds=found.get("decoding_seconds"),
    )
