"""`fledge generate`: answers to one or several prompts."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.answering import answer_all, as_prompts, show_answer
from fledge.cli.drafting import choose_drafting
from fledge.cli.engine_options import (
    CopiesOption,
    EngineOption,
    EnginePythonOption,
    TunedOption,
    TypedDrafting,
    check_engine,
)
from fledge.cli.loading import Loaded, load
from fledge.cli.outside_generate import OutsideAnswers, generate_outside
from fledge.cli.prompts import read_prompts
from fledge.cli.render import figures, print_json, say, shorten, write_text
from fledge.contracts.errors import ConfigError
from fledge.contracts.outputs import Completion
from fledge.contracts.recipe import DEFAULT_TARGET
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import DEFAULT_HEAD

PromptOption = Annotated[
    list[str],
    typer.Option(
        "--prompt",
        metavar="TEXT|-",
        help="What to answer; - reads stdin. Several prompts are answered together.",
    ),
]


def generate(
    prompt: PromptOption,
    target: options.TargetOption = DEFAULT_TARGET,
    head: options.HeadOption = DEFAULT_HEAD,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    max_tokens: options.MaxTokensOption = options.SAMPLING.max_tokens,
    min_tokens: options.MinTokensOption = options.SAMPLING.min_tokens,
    temperature: options.TemperatureOption = options.SAMPLING.temperature,
    top_k: options.TopKOption = options.SAMPLING.top_k,
    top_p: options.TopPOption = options.SAMPLING.top_p,
    min_p: options.MinPOption = options.SAMPLING.min_p,
    logit_bias: options.LogitBiasOption = None,
    repetition_penalty: options.RepetitionPenaltyOption = options.SAMPLING.repetition_penalty,
    presence_penalty: options.PresencePenaltyOption = options.SAMPLING.presence_penalty,
    frequency_penalty: options.FrequencyPenaltyOption = options.SAMPLING.frequency_penalty,
    seed: options.SeedOption = options.SAMPLING.seed,
    stop: options.StopOption = None,
    raw: options.RawOption = False,
    depth: options.DepthOption = None,
    width: options.WidthOption = None,
    budget: options.BudgetOption = None,
    accept: options.AcceptOption = options.ENGINE.accept,
    controller: options.ControllerOption = None,
    copies: CopiesOption = options.ENGINE.copies,
    engine: EngineOption = "fledge",
    engine_python: EnginePythonOption = None,
    tuned: TunedOption = None,
    logprobs: options.LogprobsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Answer a prompt.

    The text goes to stdout while it is made, the figures to stderr.

    Example: [cyan]fledge generate --prompt "Name three rivers." --max-tokens 60[/cyan]

    One JSON document comes with --json: text, token_ids, prompt_token_ids, num_tokens,
    tokens_per_s, accept_length, cycles, offered_at_depth, accepted_at_depth, num_copies_offered,
    num_copies_accepted, time_to_first_token_s, time_per_token_s, num_prompt_reused, finish_reason,
    logprobs, target, target_dir, head; with several prompts {"completions": [...], target, ...}.
    Another --engine counts all together.
    """
    if logprobs is not None and not json:
        raise ConfigError("--logprobs are shown in JSON only; add --json.")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logit_bias=options.logit_bias(logit_bias),
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
    )
    check_engine(engine, engine_python)
    drafting = choose_drafting(
        head,
        target=target,
        tuned=tuned,
        typed=TypedDrafting(
            depth=depth, width=width, budget=budget, controller=controller, copies=copies
        ),
    )
    texts = read_prompts(prompt, raw=raw)
    most = min(options.ENGINE.max_requests, len(texts))
    choice = drafting.choice(target, dtype=dtype, device=device, accept=accept, max_requests=most)
    if engine == "fledge":
        _answer_here(load(choice), texts, params, raw=raw, is_json=json)
        return
    generate_outside(
        OutsideAnswers(
            engine=engine,
            python=engine_python,
            choice=choice,
            drafting=drafting,
            params=params,
            texts=texts,
            is_raw=raw,
            is_json=json,
        )
    )


def _answer_here(
    loaded: Loaded, texts: list[str], params: SamplingParams, *, raw: bool, is_json: bool
) -> None:
    """Answer with our own engine."""
    if is_json:
        prompts = as_prompts(loaded.engine, texts, raw=raw)
        print_json(_document(loaded, answer_all(loaded.engine, prompts, params)))
    else:
        _show(loaded, texts, params, raw=raw)


def _document(loaded: Loaded, completions: list[Completion]) -> dict[str, Any]:
    records = [as_record(completion) for completion in completions]
    if len(records) == 1:
        return records[0] | loaded.names
    return {"completions": records} | loaded.names


def as_record(completion: Completion) -> dict[str, Any]:
    """A completion as JSON has it."""
    stats = completion.stats
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "num_tokens": stats.num_tokens,
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "accept_length": stats.accept_length,
        "cycles": stats.cycles,
        "offered_at_depth": list(stats.offered_at_depth),
        "accepted_at_depth": list(stats.accepted_at_depth),
        "num_copies_offered": stats.num_copies_offered,
        "num_copies_accepted": stats.num_copies_accepted,
        "time_to_first_token_s": round(stats.time_to_first_token_s, 6),
        "time_per_token_s": stats.time_per_token_s and round(stats.time_per_token_s, 6),
        "num_prompt_reused": stats.num_prompt_reused,
        "finish_reason": completion.finish_reason,
        "logprobs": completion.logprobs and [asdict(one) for one in completion.logprobs],
    }


def _show(loaded: Loaded, texts: list[str], params: SamplingParams, *, raw: bool) -> None:
    prompts = as_prompts(loaded.engine, texts, raw=raw)
    if len(prompts) == 1:
        completion = show_answer(loaded.engine, prompts[0], params)
        say(figures(completion))
        return
    completions = answer_all(loaded.engine, prompts, params)
    for number, (text, completion) in enumerate(zip(texts, completions, strict=True), start=1):
        say(f"[{number}] {shorten(text)}")
        write_text(completion.text + "\n")
        say(figures(completion))
