"""`fledge serve --engine vllm|sglang|llamacpp`: another engine's server in place of ours."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fledge.cli.drafting import Drafting
from fledge.cli.options import ENGINE
from fledge.cli.progress import terminal_progress
from fledge.cli.render import say
from fledge.contracts.errors import ConfigError
from fledge.contracts.outside_engines import OutsideEngine
from fledge.contracts.server_settings import ServeSettings

LLAMACPP_SLOTS = 4
"""As many as its own server has by default; further requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideServer:
    """What was asked of another engine's server."""

    engine: OutsideEngine
    python: Path | None
    target: str
    drafting: Drafting
    dtype: str
    device: str
    settings: ServeSettings
    max_requests: int | None
    prints_command: bool


def serve_outside(asked: OutsideServer) -> None:
    """Export the head, then become the engine's server, or print how to start it."""
    from fledge.interop.engines.installation import engine_title, find_engine
    from fledge.interop.engines.pair import prepare_pair
    from fledge.interop.engines.server_launcher import KEYS_VARIABLE
    from fledge.interop.engines.serving import ServerPlan, exec_server, pick_port, print_words
    from fledge.models.placement import pick_device, pick_dtype

    _refuse_unknown(asked.settings)
    # Found before anything slow: a head may take minutes to export.
    found, progress = None, terminal_progress()
    if not asked.prints_command:
        with progress.task(f"looking for {asked.engine}", unit=""):
            found = find_engine(asked.engine, asked.python)
    device = pick_device(asked.device)
    dtype = str(pick_dtype(asked.dtype, device)).removeprefix("torch.")
    pair = prepare_pair(asked.engine, asked.target, asked.drafting.head, progress=progress)
    settings = replace(asked.settings, port=pick_port(asked.settings.port))
    plan = ServerPlan(
        pair=pair,
        tuned=asked.drafting.tuned_on(device.type),
        settings=settings,
        model_names=settings.model_names or (_own_name(asked.target),),
        max_requests=_slots(asked),
        dtype=dtype,
        is_cpu=device.type == "cpu",
        keys=_read_keys(settings.api_keys_file, os.environ.get(KEYS_VARIABLE, "")),
    )
    if found is None:
        print(print_words(asked.engine, plan))
        return
    say(f"starting {engine_title(asked.engine)} {found.version}: {print_words(asked.engine, plan)}")
    exec_server(found, plan)


def _slots(asked: OutsideServer) -> int:
    """llama.cpp takes the memory of every slot beforehand, and our default is many of them."""
    if asked.max_requests is not None:
        return replace(ENGINE, max_requests=asked.max_requests).max_requests
    return LLAMACPP_SLOTS if asked.engine == "llamacpp" else ENGINE.max_requests


def _own_name(target: str) -> str:
    """As fledge's own server calls it: a name or a hub id as it is, of a path the last part."""
    path = Path(target).expanduser()
    return path.resolve().name if path.exists() else target


def _refuse_unknown(settings: ServeSettings) -> None:
    """Settings that protect a server must not be dropped quietly."""
    if settings.log_prompts:
        raise ConfigError("--log-prompts is of fledge's own server; leave it out with --engine.")
    if settings.cors_origins:
        raise ConfigError("serve.cors_origins is of fledge's own server; leave it out.")


def _read_keys(file: str | None, variable: str) -> tuple[str, ...]:
    """Keys of the file, one a line, and of the environment; # begins a comment."""
    text = variable.replace(",", "\n")
    if file is not None:
        try:
            text += "\n" + Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys in {file} cannot be read: {error}.") from error
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if file is not None and not keys:
        raise ConfigError(f"{file} holds no API key; write one a line, or do without.")
    if any("," in key for key in keys):
        raise ConfigError("an API key holds a comma, which separates keys; choose another key.")
    return keys
