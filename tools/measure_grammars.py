"""Grammar libraries on real vocabularies, and what a grammar costs an engine.

    python tools/measure_grammars.py --targets DIR [DIR ...] --engine DIR --out benchmarks/FILE.json

`--targets` are directories with a tokenizer.json; `--engine` is a target to answer with. llguidance
is measured as fledge uses it; xgrammar, which fledge does not need, where it is installed.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance
from fledge.contracts.grammar import Grammar
from fledge.engine import grammar_masks
from fledge.models.tokenizer import TargetTokenizer

TEXT = '{"name": "Jürgen 🦅", "age": 42, "tags": ["a", "b\\n", "a longer text of several words"]}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Each with an instance that keeps to it and one that does not: a library refuses the schema,
# follows it, ignores the keyword, or allows less than the schema does.
KEYWORDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown type": ({"type": "nonsense"}, "1", "1"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
    "maximum": ({"type": "integer", "maximum": 10}, "10", "11"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "6", "4"),
    "maxLength": ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1, 2]"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1, 2]", "[1, 1]"),
    "not": ({"not": {"type": "string"}}, "1", '"a"'),
    "allOf": ({"allOf": [{"type": "integer"}, {"maximum": 10}]}, "10", "11"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"maximum": 10}]}, "11", "5"),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        '{"c": 1}',
        '{"a": 1}',
    ),
    "unknown format": ({"type": "string", "format": "weird"}, '"a"', '"a"'),
    "format date": ({"type": "string", "format": "date"}, '"2026-11-15"', '"a"'),
    "$ref to nothing": ({"$ref": "#/nowhere"}, "1", "1"),
}


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def walk(ids: list[int], mask: Callable[[], Any], take: Callable[[int], bool]) -> dict[str, Any]:
    """Times of the masks along a text, and how much of it was taken."""
    times, taken = [], 0
    for token_id in ids:
        times.append(seconds(mask)[0] * 1e6)
        if not take(token_id):
            break
        taken += 1
    return {
        "tokens": len(ids),
        "taken": taken,
        "mask_us_median": round(statistics.median(times), 1),
        "mask_us_largest": round(max(times), 1),
    }


def with_llguidance(tokenizer: TargetTokenizer, ids: Callable[[str], list[int]]) -> dict[str, Any]:
    from llguidance import LLMatcher, LLTokenizer

    text = tokenizer.backend_json()
    vocabulary_s, vocabulary = seconds(lambda: LLTokenizer(text))

    def compiled(schema: dict[str, Any]) -> Any:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        return LLMatcher(vocabulary, grammar, log_level=0)

    compile_s, matcher = seconds(lambda: compiled(SCHEMA))
    found = walk(ids(TEXT), matcher.compute_bitmask, matcher.consume_token)

    def takes(schema: dict[str, Any], text: str) -> bool | None:
        matcher = compiled(schema)
        if matcher.is_error():
            return None
        return all(matcher.consume_token(one) for one in ids(text)) and matcher.is_accepting()

    return {"vocabulary_s": vocabulary_s, "compile_s": compile_s, **found, "takes": takes}


def with_xgrammar(tokenizer: TargetTokenizer, ids: Callable[[str], list[int]]) -> dict[str, Any]:
    xgrammar = importlib.import_module("xgrammar")
    inner = tokenizer._tokenizer
    vocabulary_s, info = seconds(lambda: xgrammar.TokenizerInfo.from_huggingface(inner))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def compiled(schema: dict[str, Any]) -> Any:
        return xgrammar.GrammarMatcher(
            compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        )

    compile_s, matcher = seconds(lambda: compiled(SCHEMA))
    bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    found = walk(ids(TEXT), lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token)

    def takes(schema: dict[str, Any], text: str) -> bool | None:
        try:
            matcher = compiled(schema)
        except RuntimeError:
            return None
        is_taken = all(matcher.accept_token(one) for one in ids(text))
        return is_taken and bool(matcher.accept_token(int(inner.eos_token_id)))

    return {"vocabulary_s": vocabulary_s, "compile_s": compile_s, **found, "takes": takes}


def judge(
    takes: Callable[[dict[str, Any], str], bool | None],
    schema: dict[str, Any],
    right: str,
    wrong: str,
) -> str:
    if takes(schema, right) is None:
        return "refused"
    if not takes(schema, right):
        return "allows less"
    return "ignored" if takes(schema, wrong) else "followed"


def measure_library(name: str, targets: list[Path]) -> dict[str, Any] | None:
    # Both need numpy at least, and fledge has torch and transformers anyway.
    try:
        import_s, _ = seconds(lambda: importlib.import_module(name))
    except ImportError:
        return None
    files = metadata.files(name) or []
    vocabularies, keywords = {}, {}
    for directory in targets:
        tokenizer = TargetTokenizer.load(directory)

        def ids(text: str, tokenizer: TargetTokenizer = tokenizer) -> list[int]:
            # Behind another letter, so that no vocabulary puts a space before the text.
            whole = tokenizer.encode_all(["\n" + text])[0]
            return whole[len(tokenizer.encode_all(["\n"])[0]) :]

        measure = with_llguidance if name == "llguidance" else with_xgrammar
        found = measure(tokenizer, ids)
        takes = found.pop("takes")
        vocabularies[directory.name] = {"vocabulary_size": tokenizer.num_tokens, **found}
        if not keywords:
            keywords = {what: judge(takes, *case) for what, case in KEYWORDS.items()}
    return {
        "version": metadata.version(name),
        "installed_bytes": sum(file.size or 0 for file in files),
        "requirements": metadata.requires(name) or [],
        "import_s": round(import_s, 3),
        "vocabularies": vocabularies,
        "keywords": keywords,
    }


def measure_engine(directory: Path, num_requests: int, max_tokens: int) -> dict[str, Any]:
    """The same requests without a grammar and with one that allows almost everything."""
    engine = Engine.load(str(directory), settings=EngineSettings(max_requests=num_requests))
    engine.grammars.prepare()
    prompts = [f"Write a list of {i + 2} colours." for i in range(num_requests)]
    spent = [0.0]
    look = grammar_masks.PassMasks.apply

    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        took, trees = seconds(lambda: look(self, *arguments, **options))
        spent[0] += took
        return trees

    setattr(grammar_masks.PassMasks, "apply", timed)  # noqa: B010
    grammar = Grammar(kind="regex", text="(.|\n)*")
    found: dict[str, Any] = {"requests": num_requests, "tokens_each": max_tokens}
    said = []
    for name, one in (("warm", None), ("free", None), ("grammar", grammar)):
        params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, grammar=one)
        took, answers = seconds(lambda params=params: engine.generate(prompts, params))
        found[f"{name}_pass_ms"] = round(1e3 * took / max_tokens, 2)
        said.append([answer.token_ids for answer in answers])
    setattr(grammar_masks.PassMasks, "apply", look)  # noqa: B010
    found["is_text_the_same"] = said[1] == said[2]
    found["masks_ms_of_a_pass"] = round(1e3 * spent[0] / max_tokens, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=Path, nargs="+", required=True)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {"provenance": provenance.collect(device="cpu")}
    for name in ("llguidance", "xgrammar"):
        document[name] = measure_library(name, options.targets)
    if options.engine is not None:
        document["engine"] = measure_engine(options.engine, options.requests, options.max_tokens)
    text = json.dumps(document, indent=1, ensure_ascii=False)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
