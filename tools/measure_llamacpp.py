"""llama.cpp with an exported head and without it: tokens a second on this machine's cores.

    python tools/measure_llamacpp.py --head HEAD --python .engines/llamacpp/bin/python --out FILE

Greedy answers to the same prompts, one after the other, in every setting: chains of several
lengths, the head's matrices in several precisions, drafting that stops below a probability. All
settings are visited in turn, `--rounds` times over, so that a busy moment hits none of them alone.
The texts must be the same in all of them. Speeds are of decoding alone, as llama.cpp counts them;
without `--python`, the Python of fledge's own environment must have xllamacpp.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge import SamplingParams
from fledge.contracts import provenance
from fledge.contracts.dialects import PRECISIONS
from fledge.contracts.settings import TreeSettings
from fledge.interop.engines.installation import InstalledEngine, find_engine
from fledge.interop.engines.job import EngineAnswers, EngineRun, run_in_engine
from fledge.interop.export import export_head
from fledge.lab.suites import load_suite
from fledge.models.resolve import resolve_target
from fledge.models.target_facts import read_facts

STORED = "stored"


@dataclass(frozen=True)
class Setting:
    """One way to decode; a depth of 0 is without the head."""

    depth: int
    precision: str = STORED
    p_min: float = 0.0

    @property
    def name(self) -> str:
        if not self.depth:
            return "plain"
        until = f", until {self.p_min:g}" if self.p_min else ""
        return f"chain of {self.depth}{until}, {self.precision}"


def main() -> None:
    options = parse()
    engine = find_engine("llamacpp", options.python)
    settings = [Setting(0)] + [
        Setting(depth, precision, p_min)
        for precision in options.precisions.split(",")
        for p_min in map(float, options.p_min.split(","))
        for depth in map(int, options.depths.split(","))
    ]
    with tempfile.TemporaryDirectory() as folder:
        heads = export_all(options, settings, Path(folder))
        runs = [make_run(options, setting, heads) for setting in settings]
        # The first of a process is slower than the others.
        rounds = [run_in_engine(engine, [runs[0], *runs])[1:] for _ in range(options.rounds)]
    document = describe(options, engine, settings, rounds)
    text = json.dumps(document, indent=1) + "\n"
    if options.out is None:
        print(text)
        return
    options.out.write_text(text, encoding="utf-8")
    for row in document["settings"]:
        print(f"{row['name']:32} {row['tokens_per_s']:7.1f} tokens/s  x{row['speedup']:.2f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--suite", action="append", help="builtin unless told otherwise")
    parser.add_argument("--prompts", type=int, default=1, help="of each task of a suite")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--depths", default="1,2,3,4")
    parser.add_argument("--precisions", default=",".join((STORED, *PRECISIONS)))
    parser.add_argument("--p-min", default="0", help="probabilities below which drafting stops")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="CPU, 2 cores")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def export_all(
    options: argparse.Namespace, settings: list[Setting], folder: Path
) -> dict[str, Path]:
    """The head in each precision, with the target beside it."""
    found = {}
    for name in {setting.precision for setting in settings} | {STORED}:
        precision = next((known for known in PRECISIONS if known == name), None)
        export_head(
            options.head,
            folder / name,
            "gguf",
            target=options.target,
            precision=precision,
            verify=True,
        )
        found[name] = folder / name
    return found


def make_run(options: argparse.Namespace, setting: Setting, heads: dict[str, Path]) -> EngineRun:
    facts = read_facts(resolve_target(options.target).directory)
    suites = [
        load_suite(name, max_prompts=options.prompts) for name in options.suite or ("builtin",)
    ]
    prompts = tuple(
        tuple(facts.tokenizer.encode_prompt(prompt.turns[0]))
        for suite in suites
        for prompt in suite.prompts
    )
    given = Path(options.target).expanduser()
    place = heads[setting.precision]
    depth = max(setting.depth, 1)
    return EngineRun(
        target=given.absolute() if given.is_file() else place / "target.gguf",
        head=place / "head.gguf" if setting.depth else None,
        tree=TreeSettings(depth=depth, width=1, budget=depth),
        prompts=prompts,
        params=SamplingParams(max_tokens=options.max_tokens),
        eos_token_ids=tuple(facts.eos_token_ids),
        dtype="auto",
        max_model_len=max(len(ids) for ids in prompts) + options.max_tokens + 64,
        engine_options={"p_min": setting.p_min},
    )


def describe(
    options: argparse.Namespace,
    engine: InstalledEngine,
    settings: list[Setting],
    rounds: list[list[EngineAnswers]],
) -> dict[str, Any]:
    plain_texts = rounds[0][0].token_ids
    speeds = [[speed_of(one[number]) for one in rounds] for number in range(len(settings))]
    rows = [
        {
            "name": setting.name,
            "depth": setting.depth,
            "precision": setting.precision if setting.depth else None,
            "p_min": setting.p_min,
            "tokens_per_s": round(statistics.median(speeds[number]), 2),
            "of_each_round": [round(speed, 2) for speed in speeds[number]],
            "speedup": round(
                statistics.median(
                    speed / plain for speed, plain in zip(speeds[number], speeds[0], strict=True)
                ),
                3,
            ),
            # Cycles that stopped before their first draft are not seen.
            "accept_length": None if setting.p_min else rounds[0][number].accept_length,
            "same_texts": sum(
                ours == plain
                for ours, plain in zip(rounds[0][number].token_ids, plain_texts, strict=True)
            ),
        }
        for number, setting in enumerate(settings)
    ]
    return {
        "provenance": provenance.collect(device=options.device),
        "engine": f"llama.cpp (xllamacpp) {engine.version}",
        "target": options.target,
        "prompts": len(plain_texts),
        "tokens": sum(len(ids) for ids in plain_texts),
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "settings": rows,
        "best": max(rows, key=lambda row: row["speedup"])["name"],
    }


def speed_of(answers: EngineAnswers) -> float:
    """Tokens a second of decoding; the first token of an answer came with its prompt."""
    assert answers.decoding_seconds is not None
    return (answers.num_tokens - len(answers.token_ids)) / answers.decoding_seconds


if __name__ == "__main__":
    main()
