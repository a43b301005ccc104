"""`fledge bench`: what a server gives its users at rising load, with a head and without."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fledge.cli import load_options, options
from fledge.cli.bench_table import show
from fledge.cli.drafting import Drafting, choose_drafting
from fledge.cli.engine_options import CopiesOption, TypedDrafting
from fledge.cli.progress import terminal_progress
from fledge.cli.render import print_json
from fledge.contracts.bench_settings import BenchSettings, parse_slo
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.recipe import load_recipe
from fledge.contracts.settings import DEFAULT_HEAD, NO_HEAD
from fledge.contracts.tuned_settings import obey

if TYPE_CHECKING:
    from fledge.lab.load_driver import Arm


def bench(
    out: options.OutOption,
    url: load_options.UrlArgument = None,
    target: load_options.TargetOption = None,
    head: options.HeadOption = DEFAULT_HEAD,
    offline: load_options.OfflineOption = False,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    depth: options.DepthOption = None,
    width: options.WidthOption = None,
    budget: options.BudgetOption = None,
    controller: options.ControllerOption = None,
    copies: CopiesOption = options.ENGINE.copies,
    concurrency: load_options.ConcurrencyOption = None,
    rates: load_options.RatesOption = None,
    prompts: load_options.PromptsOption = None,
    max_tokens: load_options.MaxTokensOption = None,
    requests: load_options.RequestsOption = None,
    repeats: load_options.RepeatsOption = None,
    slo: load_options.SloOption = None,
    gpu_price: load_options.PriceOption = None,
    model: load_options.ModelOption = None,
    tokenizer: load_options.TokenizerOption = None,
    api_key_env: load_options.KeyOption = None,
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    json: options.JsonOption = False,
) -> None:
    """Measure a server under load: latency, throughput, goodput, cost.

    At rising numbers of users, and at rates of requests that do not wait for answers. With a head
    everything is measured with and without it, in turns, up to where it stops to pay. Interrupted
    or killed, the same command goes on where it stopped.

    Example: [cyan]fledge bench http://localhost:8000/v1 --out bench/one[/cyan]

    With and without a head: [cyan]fledge bench --target smollm2-135m-instruct --head heads/tiny
    --concurrency 1,4,16 --slo ttft=500ms,tpot=30ms --gpu-price H200=3.5 --out bench/two[/cyan]

    Two servers: [cyan]fledge bench ours=http://a:8000 theirs=http://b:8000 --out bench/three[/cyan]

    One JSON document comes with --json, the same as OUT/bench.json; `fledge report` draws it.
    """
    settings = _settings(
        load_recipe(recipe, assignments or ()).bench,
        concurrency=_numbers("--concurrency", concurrency, int),
        rates=_numbers("--rates", rates, float),
        prompts=prompts,
        max_tokens=max_tokens,
        requests=requests,
        repeats=repeats,
        slo=None if slo is None else parse_slo(slo),
        gpu_prices=_prices(gpu_price),
    )
    _check_sides(url, target, head, offline=offline)
    progress = terminal_progress()
    from fledge.lab.bench import bench as run

    if url:
        from fledge.lab.bench_arms import url_arms

        counter = _token_counter(tokenizer, progress)
        arms = url_arms(url, settings, model=model, count_tokens=counter, key_variable=api_key_env)
        place = "unknown, behind HTTP"
    else:
        arms, place = _own_arms(
            choose_drafting(
                head,
                target=str(target),
                typed=TypedDrafting(
                    depth=depth, width=width, budget=budget, controller=controller, copies=copies
                ),
            ),
            settings,
            {"target": str(target), "dtype": dtype, "device": device},
            is_offline=offline,
            progress=progress,
        )
    document = run(arms, settings, out, device=place, progress=progress)
    if json:
        print_json({"out": str(out), **document})
    else:
        show(document)
        print(out)


def _settings(chosen: BenchSettings, **typed: Any) -> BenchSettings:
    """The recipe's settings, less what was typed."""
    return replace(chosen, **{name: value for name, value in typed.items() if value is not None})


def _check_sides(url: list[str] | None, target: str | None, head: str, *, offline: bool) -> None:
    if bool(url) == (target is not None):
        raise ConfigError(
            "give either the URL of a server, or --target to have one started: one of the two."
        )
    if url and (head not in (NO_HEAD, DEFAULT_HEAD) or offline):
        raise ConfigError(
            "--head and --offline go with --target; a server behind a URL has its head already. "
            "To compare, start one with and one without: fledge bench plain=URL head=URL."
        )


def _own_arms(
    drafting: Drafting,
    settings: BenchSettings,
    chosen: dict[str, str],
    *,
    is_offline: bool,
    progress: Progress,
) -> "tuple[list[Arm], str]":
    """Our server or engine with and without the head, with room for every user."""
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.lab.bench_arms import EngineChoice, server_arms, with_room
        from fledge.lab.bench_engine_arms import check_head, device_name, engine_arms
        from fledge.models.placement import pick_device

        check_head(drafting.head)
        engine = with_room(drafting.settings, settings)
        engine = obey(drafting.tuned_on(pick_device(chosen["device"]).type), engine)
    choice = EngineChoice(head=drafting.head, engine=engine, **chosen)
    make_arms = engine_arms if is_offline else server_arms
    return make_arms(choice, settings), device_name(choice.device)


def _token_counter(target: str | None, progress: Progress) -> Callable[[str], int] | None:
    """Counts tokens of a text as a target's tokenizer cuts it."""
    if target is None:
        return None
    with progress.task("starting", unit=""):
        from fledge.models.resolve import resolve_target
        from fledge.models.tokenizer import TargetTokenizer

        tokenizer = TargetTokenizer.load(resolve_target(target, progress=progress).directory)
    return lambda text: len(tokenizer.encode(text))


def _numbers(option: str, typed: str | None, kind: type) -> tuple[Any, ...] | None:
    if typed is None:
        return None
    if typed.strip() == "none":
        return ()
    try:
        return tuple(kind(part) for part in typed.split(","))
    except ValueError:
        raise ConfigError(f"{option} {typed!r} is not a list of numbers like 1,2,4.") from None


def _prices(typed: list[str] | None) -> dict[str, float] | None:
    if typed is None:
        return None
    found = {}
    for entry in typed:
        name, equals, price = entry.rpartition("=")
        try:
            found[name if equals else "GPU"] = float(price)
        except ValueError:
            raise ConfigError(f"--gpu-price {entry!r} is not of the form H200=3.5.") from None
    return found
