"""`fledge generate --engine vllm|sglang|llamacpp`: prompts answered by another engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.cli.drafting import Drafting
from fledge.cli.loading import Choice
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, print_json, say, shorten, write_text
from fledge.contracts.errors import ConfigError
from fledge.contracts.outside_engines import OutsideEngine
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import TreeSettings

if TYPE_CHECKING:
    from fledge.interop.engines.installation import InstalledEngine
    from fledge.interop.engines.job import EngineAnswers, EngineRun
    from fledge.models.tokenizer import TargetTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideAnswers:
    """What was asked of another engine."""

    engine: OutsideEngine
    python: Path | None
    choice: Choice
    drafting: Drafting
    params: SamplingParams
    texts: list[str]
    is_raw: bool
    is_json: bool


def generate_outside(asked: OutsideAnswers) -> None:
    """Export the head, answer the prompts in the engine, print what it said."""
    from fledge.interop.engines.installation import find_engine
    from fledge.interop.engines.job import run_in_engine

    _refuse_unknown(asked)
    progress = terminal_progress()
    with progress.task(f"looking for {asked.engine}", unit=""):
        engine = find_engine(asked.engine, asked.python)
    with progress.task(f"running {asked.engine} {engine.version}", unit=""):
        run, tokenizer = _prepare(asked)
        (answers,) = run_in_engine(engine, [run])
    texts = [_before(asked.params.stop, tokenizer.decode(ids)) for ids in answers.token_ids]
    if asked.is_json:
        print_json(_document(asked, engine, run, answers, texts))
        return
    for number, (prompt, text) in enumerate(zip(asked.texts, texts, strict=True), start=1):
        if len(texts) > 1:
            say(f"[{number}] {shorten(prompt)}")
        write_text(text + "\n")
    say(_figures(answers))


def _refuse_unknown(asked: OutsideAnswers) -> None:
    """What the engine would not do must not be dropped quietly."""
    if asked.params.logprobs is not None:
        raise ConfigError("--logprobs are given by fledge's own engine only; leave out --engine.")
    if asked.params.min_tokens and asked.engine == "llamacpp":
        raise ConfigError(
            "llama.cpp knows no --min-tokens; leave it out, or choose another engine."
        )


def _before(stops: tuple[str, ...], text: str) -> str:
    """A text up to the first of the stop texts."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def _prepare(asked: OutsideAnswers) -> "tuple[EngineRun, TargetTokenizer]":
    """The run for the engine, and the tokenizer that its token ids are read with."""
    from fledge.interop.engines.job import EngineRun
    from fledge.interop.engines.pair import prepare_pair
    from fledge.models.placement import pick_device, pick_dtype
    from fledge.models.target_facts import read_facts

    pair = prepare_pair(asked.engine, asked.choice.target, asked.choice.head)
    facts = read_facts(pair.directory)
    encode = facts.tokenizer.encode if asked.is_raw else facts.tokenizer.encode_prompt
    prompts = tuple(tuple(encode(text)) for text in asked.texts)
    longest = max(len(ids) for ids in prompts)
    if longest >= pair.context_len:
        raise ConfigError(
            f"a prompt has {longest} tokens and the target's context holds {pair.context_len}, "
            "the answer included; shorten the prompt."
        )
    dtype = pick_dtype(asked.choice.dtype, pick_device(asked.choice.device))
    run = EngineRun(
        target=pair.target,
        head=pair.head,
        tree=_drafts(asked),
        prompts=prompts,
        params=asked.params,
        eos_token_ids=tuple(sorted(facts.eos_token_ids)),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=min(pair.context_len, longest + asked.params.max_tokens + 64),
    )
    return run, facts.tokenizer


def _drafts(asked: OutsideAnswers) -> TreeSettings:
    """The tree for SGLang; the others draft chains."""
    from fledge.interop.serve_commands import chain_of, tree_of
    from fledge.models.placement import pick_device

    tuned = asked.drafting.tuned_on(pick_device(asked.choice.device).type)
    if asked.engine == "sglang":
        return tree_of(tuned)
    chain = chain_of(tuned)
    return TreeSettings(depth=chain, width=1, budget=chain)


def _document(
    asked: OutsideAnswers,
    engine: "InstalledEngine",
    run: "EngineRun",
    answers: "EngineAnswers",
    texts: list[str],
) -> dict[str, Any]:
    """One record for each prompt; counts and speed are of all together, as engines count them."""
    records = [
        {
            "text": text,
            "token_ids": list(ids),
            "prompt_token_ids": list(prompt),
            "num_tokens": len(ids),
            "finish_reason": reason,
        }
        for text, ids, prompt, reason in zip(
            texts, answers.token_ids, run.prompts, answers.finish_reasons, strict=True
        )
    ]
    acceptance = answers.acceptance
    together = {
        "tokens_per_s": round(answers.num_tokens / answers.seconds, 3),
        "accept_length": answers.accept_length,
        "cycles": answers.cycles,
        "offered_at_depth": list(acceptance.offered_at_position),
        "accepted_at_depth": list(acceptance.accepted_at_position),
        "engine": engine.name,
        "engine_version": engine.version,
        "target": asked.choice.target,
        "target_dir": str(run.target),
        "head": str(asked.choice.head) if asked.choice.head is not None else None,
    }
    return (records[0] if len(records) == 1 else {"completions": records}) | together


def _figures(answers: "EngineAnswers") -> str:
    speed = answers.num_tokens / answers.seconds if answers.seconds > 0 else 0.0
    parts = [count(answers.num_tokens, "token"), f"{speed:.1f} tokens/s"]
    if (length := answers.accept_length) is not None:
        cycles = count(answers.cycles, "cycle")
        parts.append(f"accept length {length:.2f} over {cycles}")
    return " · ".join(parts)
