"""Options that several verbs share: one spelling, one sentence, one default each."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from fledge.contracts.errors import ConfigError
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings

_MODEL = "Target and head"
DRAFTING = "Drafting (with a head)"
_SAMPLING = "Sampling"
_OUTPUT = "Output"

SAMPLING = SamplingParams()
TREE = TreeSettings()
ENGINE = EngineSettings()
"""Where the options' defaults come from: what the engine does when nothing is asked for."""


TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model: a built-in name, a local directory, a GGUF file or a Hugging Face id.",
        rich_help_panel=_MODEL,
    ),
]
HeadOption = Annotated[
    str,
    typer.Option(
        "--head",
        metavar="DIR|default|none",
        help="Directory of the EAGLE-3 head that drafts; `default` is the one that comes with "
        "fledge for the target, where there is one; `none` decodes without a head.",
        rich_help_panel=_MODEL,
    ),
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="Precision of the weights; auto is float32 on a CPU and bfloat16 on a GPU.",
        rich_help_panel=_MODEL,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda[:N]",
        help="Where to run; auto is the first GPU, or the CPU where there is none.",
        rich_help_panel=_MODEL,
    ),
]
DepthOption = Annotated[
    int | None,
    typer.Option(
        "--depth",
        metavar="N",
        help="Drafted tokens on the longest path of the draft tree.",
        show_default=f"as tuned, else {TREE.depth}",
        rich_help_panel=DRAFTING,
    ),
]
WidthOption = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        help="Children kept per node of the draft tree; 1 makes it a chain.",
        show_default=f"as tuned, else {TREE.width}",
        rich_help_panel=DRAFTING,
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--budget",
        metavar="N",
        help="Drafted nodes that one target pass checks, at most.",
        show_default=f"as tuned, else {TREE.budget}",
        rich_help_panel=DRAFTING,
    ),
]
AcceptOption = Annotated[
    Literal["gumbel", "rejection"],
    typer.Option(
        "--accept",
        metavar="gumbel|rejection",
        help="gumbel: a seed gives the same text with and without a head; "
        "rejection: the rule other engines use, equal in distribution only.",
        rich_help_panel=DRAFTING,
    ),
]
ControllerOption = Annotated[
    Literal["adaptive", "fixed"] | None,
    typer.Option(
        "--controller",
        metavar="adaptive|fixed",
        help="adaptive: draft as much as pays, up to the tree above; fixed: the whole tree always.",
        show_default=f"as tuned, else {ENGINE.controller}",
        rich_help_panel=DRAFTING,
    ),
]
MaxTokensOption = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="Longest answer, in tokens.",
        rich_help_panel=_SAMPLING,
    ),
]
MinTokensOption = Annotated[
    int,
    typer.Option(
        "--min-tokens",
        metavar="N",
        help="Shortest answer, in tokens: until then nothing ends it.",
        rich_help_panel=_SAMPLING,
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="T",
        help="0 takes the most probable token each time; higher is more varied.",
        rich_help_panel=_SAMPLING,
    ),
]
TopKOption = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="K",
        help="Sample among the K most probable tokens; 0 means all.",
        rich_help_panel=_SAMPLING,
    ),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Sample among the fewest tokens that hold this much probability.",
        rich_help_panel=_SAMPLING,
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="P",
        help="Drop tokens less probable than this fraction of the most probable one.",
        rich_help_panel=_SAMPLING,
    ),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=B",
        help="Add B to the logit of a token id; may be given several times.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="R",
        help="Above 1, tokens of the prompt and the answer become less probable; "
        "not given, the target's own setting counts.",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenaltyOption = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        metavar="P",
        help="Above 0, tokens of the answer become less probable.",
        rich_help_panel=_SAMPLING,
    ),
]
FrequencyPenaltyOption = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        metavar="P",
        help="Above 0, tokens become less probable each time they are said.",
        rich_help_panel=_SAMPLING,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="S",
        help="Same seed, same prompt: same text, with or without a head.",
        rich_help_panel=_SAMPLING,
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End the answer before this text; may be given several times.",
        rich_help_panel=_SAMPLING,
    ),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="With --json: the logprob of each token, and the N most probable ones beside it.",
        rich_help_panel=_OUTPUT,
    ),
]
RawOption = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Continue the prompt as it stands, without the target's chat template.",
        rich_help_panel=_SAMPLING,
    ),
]


def _local(out: Path) -> Path:
    if re.match(r"[a-z][a-z0-9]+:/", str(out)):
        raise ConfigError(f"--out is {out}; this verb writes to a local directory only: give one.")
    return out


OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        callback=_local,
        help="Directory of the result; a new one, an empty one, or one to go on in.",
        rich_help_panel=_OUTPUT,
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE.toml",
        help="The recipe with the settings; without one all are defaults.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting of the recipe, as prepare.rows=1000; may be given several times.",
    ),
]
PlanOption = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Only say what would be read and written, with bytes and time.",
        rich_help_panel=_OUTPUT,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print exactly one JSON document on stdout, and nothing else there.",
        rich_help_panel=_OUTPUT,
    ),
]


def logit_bias(typed: list[str] | None) -> tuple[tuple[int, float], ...]:
    """What `--logit-bias` was given, as pairs of token id and bias."""
    return tuple(_one_bias(entry) for entry in typed or ())


def _one_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias {entry!r} is not of the form ID=B, as in 13=-5.") from None
