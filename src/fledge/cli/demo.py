"""`fledge demo`: the same prompts without and with a head, side by side.

For a target without a head it is one answer, and a word on how to get a head.
"""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.answering import answer_all, show_answer
from fledge.cli.demo_contest import TURNS, Contest, summarise
from fledge.cli.demo_display import run_quietly, run_visibly
from fledge.cli.demo_page import intro_lines, make_console, show, summary_lines
from fledge.cli.demo_prompts import PROMPTS, read_prompt_file
from fledge.cli.drafting import choose_drafting
from fledge.cli.engine_options import CopiesOption, TunedOption, TypedDrafting
from fledge.cli.loading import Loaded, load
from fledge.cli.progress import terminal_progress
from fledge.cli.render import figures, print_json, say
from fledge.contracts import provenance
from fledge.contracts.errors import MeasurementError
from fledge.contracts.recipe import DEFAULT_TARGET
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import DEFAULT_HEAD

_MAX_TOKENS = 128
_TEMPLATE_TOKENS = 1024
"""Room for what a chat template puts around a prompt, and for drafts."""

_NEXT_STEPS = """\
Try next:
  {program} chat
  {program} generate --prompt "Write a haiku about rivers." --temperature 0.8 --seed 7
  {program} serve --port 8000"""
_NO_HEAD = """\
{target} has no head, so this is the target alone. Train one: {program} run RECIPE.toml --out DIR
(docs/run.md), then: {program} demo --target {target} --head DIR/train"""

PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Ask these instead, one prompt a line."),
]


def demo(
    target: options.TargetOption = DEFAULT_TARGET,
    head: options.HeadOption = DEFAULT_HEAD,
    dtype: options.DtypeOption = "float32",
    device: options.DeviceOption = "auto",
    prompts: PromptsOption = None,
    max_tokens: options.MaxTokensOption = _MAX_TOKENS,
    tuned: TunedOption = None,
    copies: CopiesOption = options.ENGINE.copies,
    json: options.JsonOption = False,
) -> None:
    """Watch the target answer without and with its head: the same text, faster.

    A few prompts, greedy, each answered both ways in turns. The first time, the target is fetched
    (about 93 MB) and kept in the cache; after that no network is needed. In float32 answers that
    differ are an error.

    Example: [cyan]fledge demo[/cyan]

    One JSON document comes with --json: outputs_identical, baseline_tokens_per_s,
    speculative_tokens_per_s, speedup, accept_length, prompts (the same for each), target, head,
    dtype, device, tree, controller, copies, max_tokens, provenance and others.
    """
    params = SamplingParams(max_tokens=max_tokens)  # what is wrong is said before long loading
    asked = PROMPTS if prompts is None else read_prompt_file(prompts)
    drafting = choose_drafting(
        head,
        target=target,
        tuned=tuned,
        typed=TypedDrafting(copies=copies),
    )
    longest = max(len(prompt.encode()) for prompt in asked)
    choice = drafting.choice(
        target,
        dtype=dtype,
        device=device,
        max_requests=1,
        # Both engines must fit beside each other, and neither may find what it read before.
        cache_tokens=longest + max_tokens + _TEMPLATE_TOKENS,
        share_prefixes=False,
    )
    loaded = load(choice)
    if drafting.head is None:
        _show_target_alone(loaded, asked[0], params, is_json=json)
        return
    _compare(loaded, asked, max_tokens, is_json=json)


def _compare(loaded: Loaded, prompts: tuple[str, ...], max_tokens: int, *, is_json: bool) -> None:
    contest = Contest(loaded, max_tokens)
    with terminal_progress().task("warming up", unit=""):
        contest.warm_up()
    facts = _facts(loaded, len(prompts), max_tokens)
    if is_json:
        document = facts | summarise(run_quietly(contest, prompts))
        print_json(document | {"provenance": provenance.collect(device=facts["device_name"])})
    else:
        console = make_console()
        show(console, ["", *intro_lines(facts), ""])
        document = facts | summarise(run_visibly(contest, prompts, console))
        show(console, summary_lines(document))
        say(f"\n{_NEXT_STEPS.format(program=_program())}")
    _refuse_differences(document)


def _facts(loaded: Loaded, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """What was compared, and where."""
    import torch

    target, settings = loaded.engine.target, loaded.engine.settings
    is_cuda = target.device.type == "cuda"
    return {
        **loaded.names,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "device_name": torch.cuda.get_device_name(target.device) if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "tree": asdict(settings.tree),
        "controller": settings.controller,
        "copies": settings.copies,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "order": list(TURNS),
    }


def _refuse_differences(document: dict[str, Any]) -> None:
    """In float32 drafts change nothing; shorter numbers may round to another token."""
    if document["outputs_identical"]:
        return
    number, entry = next(
        (number, entry)
        for number, entry in enumerate(document["prompts"], start=1)
        if not entry["outputs_identical"]
    )
    place = f"prompt {number} from token {entry['first_different_token'] + 1} on"
    if document["dtype"] != "float32":
        say(
            f"\nAnswers differ ({place}). In {document['dtype']} a pass over several tokens rounds "
            "differently from a pass over one, which shows where two tokens are nearly equal; "
            "--dtype float32 compares exactly."
        )
        return
    raise MeasurementError(
        f"the answers without and with the head differ ({place}); in {document['dtype']} they must "
        "not. This is an error of fledge: please report it with what `fledge doctor --json` says."
    )


def _show_target_alone(
    loaded: Loaded, prompt: str, params: SamplingParams, *, is_json: bool
) -> None:
    if is_json:
        completion = answer_all(loaded.engine, [prompt], params)[0]
        print_json(
            loaded.names
            | {
                "prompt": prompt,
                "text": completion.text,
                "num_tokens": completion.stats.num_tokens,
                "tokens_per_s": round(completion.stats.tokens_per_s, 3),
            }
        )
        return
    target, program = loaded.choice.target, _program()
    say(f"\n{target} is asked: {prompt}\n")
    completion = show_answer(loaded.engine, prompt, params)
    say(f"\n{figures(completion)}")
    say(f"\n{_NO_HEAD.format(target=target, program=program)}")
    say(f"\n{_NEXT_STEPS.format(program=program)}")


def _program() -> str:
    """How to call this program from here: by name when the shell finds it, else by its path."""
    script = Path(sys.argv[0])
    if script.name != "fledge":
        return "python -m fledge"
    found = shutil.which("fledge")
    if found is not None and Path(found).samefile(script):
        return "fledge"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
