"""Options of `fledge bench`: which servers, how much load, what counts as good."""

from typing import Annotated

import typer

_LOAD = "Load"
_SERVER = "Servers"

UrlArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]URL...",
        help="Servers with OpenAI's API; others are compared with the first.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Without a URL: start our own server for this target, once without a head and, where "
        "there is one, once with it.",
        rich_help_panel="Target and head",
    ),
]
OfflineOption = Annotated[
    bool,
    typer.Option(
        "--offline", help="Measure the engine in this process, without a server.",
        rich_help_panel="Target and head",
    ),
]  # fmt: skip
ConcurrencyOption = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="1,2,4...",
        help="Closed loop: users at once; `none` for no closed loop.",
        rich_help_panel=_LOAD,
    ),
]
RatesOption = Annotated[
    str | None,
    typer.Option(
        "--rates",
        metavar="1,2.5...",
        help="Open loop: requests per second; latencies count from when a request was due.",
        rich_help_panel=_LOAD,
    ),
]
PromptsOption = Annotated[
    str | None,
    typer.Option("--prompts", metavar="SUITE|FILE", help="What is asked.", rich_help_panel=_LOAD),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Longest answer.", rich_help_panel=_LOAD),
]
RequestsOption = Annotated[
    int | None,
    typer.Option(
        "--requests",
        metavar="N",
        help="Requests of a measurement, at least; 4 for each user at least.",
        rich_help_panel=_LOAD,
    ),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        help="Times that everything is measured; intervals come from these.",
        rich_help_panel=_LOAD,
    ),
]
SloOption = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="ttft=500ms,tpot=30ms",
        help="Service level: goodput counts the answers that keep it.",
        rich_help_panel=_LOAD,
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu-price",
        metavar="[NAME=]PRICE",
        help="Price of a GPU's hour, for the cost of a million tokens; may be given several times.",
        rich_help_panel=_LOAD,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="What the servers call the target; not needed where they have only one.",
        rich_help_panel=_SERVER,
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME",
        help="A target whose tokenizer counts tokens where a server does not.",
        rich_help_panel=_SERVER,
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="VARIABLE",
        help="Environment variable that holds the key; OPENAI_API_KEY unless told otherwise.",
        rich_help_panel=_SERVER,
    ),
]
