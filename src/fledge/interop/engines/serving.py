"""The server of another engine, started with our settings in its own words."""

import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.errors import ConfigError
from fledge.contracts.outside_engines import OutsideEngine
from fledge.contracts.server_settings import ServeSettings
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.engines.installation import InstalledEngine, engine_title
from fledge.interop.engines.pair import EnginePair
from fledge.interop.engines.server_launcher import KEYS_VARIABLE
from fledge.interop.serve_commands import chain_of, sglang_command, vllm_command

_FOLDER = Path(__file__).parent
_MODULES = {"vllm": "vllm.entrypoints.cli.main", "sglang": "sglang.launch_server"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What is served, to whom, and how."""

    pair: EnginePair
    tuned: TunedSettings | None
    settings: ServeSettings
    model_names: tuple[str, ...]
    max_requests: int
    dtype: str
    is_cpu: bool
    keys: tuple[str, ...] = ()


def server_words(name: OutsideEngine, plan: ServerPlan) -> list[str]:
    """The engine's command as its people would type it, without the keys."""
    if name == "vllm":
        return _vllm_words(plan)
    if name == "sglang":
        return _sglang_words(plan)
    return _llama_server_words(plan)


def print_words(name: OutsideEngine, plan: ServerPlan) -> str:
    """The command for a shell; keys stay in their file."""
    words = shlex.join(server_words(name, plan))
    file = plan.settings.api_keys_file
    if not plan.keys:
        return words
    if file is None:
        return f'{words} --api-key "${KEYS_VARIABLE}"'
    if name == "llamacpp":
        return f"{words} --api-key-file {shlex.quote(file)}"
    return f"{words} --api-key $(cat {shlex.quote(file)})"


def exec_server(engine: InstalledEngine, plan: ServerPlan) -> None:
    """Become the engine's server: signals, output and exit code are its own."""
    words = server_words(engine.name, plan)
    if engine.name == "llamacpp":
        words = [str(_FOLDER / "llamacpp_server.py"), *_llamacpp_words(plan)]
    else:
        # `vllm` and `python -m sglang.launch_server` become the module run by its own Python.
        start = 1 if engine.name == "vllm" else 3
        launcher = str(_FOLDER / "server_launcher.py")
        words = [launcher, _MODULES[engine.name], *words[start:]]
    environment = {**os.environ, KEYS_VARIABLE: ",".join(plan.keys)}
    environment.pop("PYTHONPATH", None)
    python = str(engine.python)
    os.execve(python, [python, *words], environment)


def pick_port(port: int) -> int:
    """Other engines want a number: a free one, where any will do."""
    if port:
        return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _vllm_words(plan: ServerPlan) -> list[str]:
    pair, settings = plan.pair, plan.settings
    words = ["vllm", "serve", str(pair.target)]
    if pair.head_config is not None:
        command = vllm_command(str(pair.target), str(pair.head), plan.tuned, pair.head_config)
        words = shlex.split(command)
    words += ["--host", settings.host, "--port", str(settings.port)]
    words += ["--served-model-name", *plan.model_names]
    words += ["--dtype", plan.dtype, "--max-num-seqs", str(plan.max_requests)]
    if limit := _max_len(plan):
        words += ["--max-model-len", str(limit)]
    return [*words, "--enforce-eager"] if plan.is_cpu else words


def _sglang_words(plan: ServerPlan) -> list[str]:
    pair, settings = plan.pair, plan.settings
    if len(plan.keys) > 1:
        raise ConfigError(
            f"there are {len(plan.keys)} API keys, and {engine_title('sglang')} takes one; give "
            "one, or put a gateway before it."
        )
    if len(plan.model_names) > 1:
        raise ConfigError(
            f"there are {len(plan.model_names)} model names, and {engine_title('sglang')} takes "
            "one; give --model-name once."
        )
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(pair.target)]
    if pair.head_config is not None:
        command = sglang_command(str(pair.target), str(pair.head), plan.tuned, pair.head_config)
        words = shlex.split(command)
    words += ["--host", settings.host, "--port", str(settings.port)]
    words += ["--served-model-name", *plan.model_names]
    words += ["--dtype", plan.dtype, "--max-running-requests", str(plan.max_requests)]
    if limit := _max_len(plan):
        words += ["--context-length", str(limit)]
    return words


def _llama_server_words(plan: ServerPlan) -> list[str]:
    """llama.cpp's own program, for machines that have it."""
    words = ["llama-server", "--model", str(plan.pair.target)]
    if plan.pair.head is not None:
        words += ["--model-draft", str(plan.pair.head), "--spec-type", "draft-eagle3"]
        words += ["--spec-draft-n-max", str(chain_of(plan.tuned))]
    words += ["--host", plan.settings.host, "--port", str(plan.settings.port)]
    words += ["--alias", ",".join(plan.model_names), "--parallel", str(plan.max_requests)]
    return [*words, "--ctx-size", str(_all_slots(plan)), "--jinja"]


def _llamacpp_words(plan: ServerPlan) -> list[str]:
    """The same for `llamacpp_server.py`, which needs no more than the wheel of xllamacpp."""
    words = ["--model", str(plan.pair.target), "--depth", str(chain_of(plan.tuned))]
    if plan.pair.head is not None:
        words += ["--head", str(plan.pair.head)]
    words += ["--host", plan.settings.host, "--port", str(plan.settings.port)]
    words += ["--alias", ",".join(plan.model_names), "--parallel", str(plan.max_requests)]
    return [*words, "--context", str(_all_slots(plan))]


def _max_len(plan: ServerPlan) -> int:
    """Tokens of prompt and answer where both are limited, else 0: what the target holds."""
    longest, answer = plan.settings.max_prompt_tokens, plan.settings.max_answer_tokens
    return min(longest + answer, plan.pair.context_len) if longest and answer else 0


def _all_slots(plan: ServerPlan) -> int:
    """llama.cpp divides its context among its slots."""
    return (_max_len(plan) or plan.pair.context_len) * plan.max_requests
