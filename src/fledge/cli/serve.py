"""`fledge serve`: OpenAI's API over the engine."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.drafting import Drafting, choose_drafting
from fledge.cli.engine_options import (
    CopiesOption,
    EngineOption,
    EnginePythonOption,
    PrintCommandOption,
    TunedOption,
    TypedDrafting,
    check_engine,
)
from fledge.cli.outside_serve import OutsideServer, serve_outside
from fledge.cli.progress import terminal_progress
from fledge.cli.render import say
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.recipe import load_recipe
from fledge.contracts.server_settings import ServeSettings
from fledge.contracts.settings import DEFAULT_HEAD, EngineSettings

_SERVER = "Server"

HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on; not given, only this machine reaches it.",
        rich_help_panel=_SERVER,
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        help="Port to listen on, 8000 unless told otherwise; 0 takes any free one.",
        rich_help_panel=_SERVER,
    ),
]
ModelNameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-name",
        metavar="NAME",
        help="What clients call the target; may be given several times.",
        rich_help_panel=_SERVER,
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--api-keys",
        metavar="FILE",
        help="API keys, one a line; read again when the file changes.",
        rich_help_panel=_SERVER,
    ),
]
MaxRequestsOption = Annotated[
    int | None,
    typer.Option(
        "--max-requests",
        metavar="N",
        help="Answers made at the same time; further ones wait.",
        show_default=f"{options.ENGINE.max_requests}, and 4 in llama.cpp",
        rich_help_panel=_SERVER,
    ),
]
CacheTokensOption = Annotated[
    int,
    typer.Option(
        "--cache-tokens",
        metavar="N",
        help="Tokens of cache memory for all requests; 0 takes what the device can give.",
        rich_help_panel=_SERVER,
    ),
]
BatchDirOption = Annotated[
    Path | None,
    typer.Option(
        "--batch-dir",
        metavar="DIR",
        help="Where files and batches are kept; not given, below the cache.",
        rich_help_panel=_SERVER,
    ),
]
LogPromptsOption = Annotated[
    bool,
    typer.Option(
        "--log-prompts",
        help="Write prompts and answers into the log.",
        rich_help_panel=_SERVER,
    ),
]
OwnTargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model to serve: a built-in name, a local directory, a GGUF file or a Hugging "
        "Face id; by default that of the recipe.",
        rich_help_panel="Target and head",
    ),
]


def serve(
    target: OwnTargetOption = None,
    head: options.HeadOption = DEFAULT_HEAD,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    host: HostOption = None,
    port: PortOption = None,
    model_name: ModelNameOption = None,
    api_keys: KeysOption = None,
    max_requests: MaxRequestsOption = None,
    cache_tokens: CacheTokensOption = options.ENGINE.cache_tokens,
    batch_dir: BatchDirOption = None,
    log_prompts: LogPromptsOption = False,
    depth: options.DepthOption = None,
    width: options.WidthOption = None,
    budget: options.BudgetOption = None,
    accept: options.AcceptOption = options.ENGINE.accept,
    controller: options.ControllerOption = None,
    copies: CopiesOption = options.ENGINE.copies,
    engine: EngineOption = "fledge",
    engine_python: EnginePythonOption = None,
    print_command: PrintCommandOption = False,
    tuned: TunedOption = None,
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
) -> None:
    """Serve a target over OpenAI's API.

    Chats, completions, streaming, logprobs and tools at /v1; figures at /metrics and
    /v1/speculation. Limits and time-outs are settings of the recipe's table serve. The log, one
    JSON object a line, goes to stderr. SIGTERM lets running answers finish. With --engine another
    engine's own server takes the place of all that, with the head exported for it.

    Example: [cyan]fledge serve --target smollm2-135m-instruct --port 8000[/cyan]
    """
    given = {
        "host": host,
        "port": port,
        "model_names": tuple(model_name) if model_name else None,
        "api_keys_file": str(api_keys.expanduser()) if api_keys is not None else None,
        "log_prompts": log_prompts or None,
    }
    chosen = load_recipe(recipe, assignments or ())
    settings = replace(chosen.serve, **_filled(given))
    if batch_dir is not None:
        batches = replace(settings.batches, directory=str(batch_dir.expanduser()))
        settings = replace(settings, batches=batches)
    check_engine(engine, engine_python, print_command=print_command)
    drafting = choose_drafting(
        head,
        target=target or chosen.target,
        tuned=tuned,
        typed=TypedDrafting(
            depth=depth, width=width, budget=budget, controller=controller, copies=copies
        ),
    )
    if engine != "fledge":
        serve_outside(
            OutsideServer(
                engine=engine,
                python=engine_python,
                target=target or chosen.target,
                drafting=drafting,
                dtype=dtype,
                device=device,
                settings=settings,
                max_requests=max_requests,
                prints_command=print_command,
            )
        )
        return
    _serve_here(
        target or chosen.target,
        drafting,
        settings,
        dtype=dtype,
        device=device,
        engine_settings=replace(
            drafting.settings,
            accept=accept,
            max_requests=options.ENGINE.max_requests if max_requests is None else max_requests,
            cache_tokens=cache_tokens,
        ),
    )


def _serve_here(
    target: str,
    drafting: Drafting,
    settings: ServeSettings,
    *,
    dtype: str,
    device: str,
    engine_settings: EngineSettings,
) -> None:
    """Serve with our own engine."""
    # A log holds nothing but its lines, so that only somebody who looks on is told.
    progress = terminal_progress() if sys.stderr.isatty() else SilentProgress()
    try:
        with progress.task("starting", unit=""):
            from fledge.server.logs import json_logs
            from fledge.server.serving import serve as run_server
            from fledge.server.wire import EngineChoice
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fledge"):
            raise
        raise ConfigError(
            f"serving needs the package {error.name}, which is not installed: "
            "pip install 'fledge[serve]'."
        ) from error
    choice = EngineChoice(
        target=target,
        head=drafting.head,
        dtype=dtype,
        device=device,
        settings=engine_settings,
        tuned=drafting.tuned_by_kind,
    )
    with json_logs():
        run_server(
            choice,
            settings,
            on_listening=lambda url: progress.note(f"loading {target} for {url}/v1"),
            on_ready=lambda url: say(f"{target} is served at {url}/v1"),
        )


def _filled(given: dict[str, Any]) -> dict[str, Any]:
    """What was typed; the rest is the recipe's."""
    return {name: value for name, value in given.items() if value is not None}
