"""Answers prompts in SGLang; runs in SGLang's own environment, which needs a GPU.

    python sglang_runner.py JOB.json RESULT.json

Job and result are those of `fledge.interop.engines.job`; the result is written anew after every
run. Engines with the same turn start side by side and answer alone. SGLang tells of each answer how
many of its verify passes accepted how many drafts, which is what the counts by position are made
of.
"""

import fcntl
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_HISTOGRAM = "spec_correct_drafts_histogram"
_OLDER_HISTOGRAM = "spec_accept_histogram"


def main() -> None:
    job_file, result_file = (Path(name) for name in sys.argv[1:])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    turn = os.open(job["turn"], os.O_CREAT | os.O_RDWR) if job["turn"] else None
    _take(turn, fcntl.LOCK_SH)
    loaded, runs = _Loaded(), []
    for run in job["runs"]:
        _say("starting an engine, unless it is the one before")
        engine = loaded.get(_options(run))
        _take(turn, fcntl.LOCK_EX)
        _say(f"answering {len(run['prompts'])} prompts, {run['group_size']} at a time")
        runs.append(_run(engine, run))
        _write(result_file, {"version": importlib.metadata.version("sglang"), "runs": runs})
    _say("done")
    loaded.close()


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _take(turn: int | None, how: int) -> None:
    """Shared while an engine starts; alone, and so after all starts, while one answers."""
    if turn is not None:
        fcntl.flock(turn, how)


def _write(file: Path, result: dict[str, Any]) -> None:
    """Whole or not at all, for whoever reads it meanwhile."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(file)


class _Loaded:
    """The engine of the last run, kept for the next one where it is the same."""

    def __init__(self) -> None:
        self._options: dict[str, Any] | None = None
        self._engine: Any = None

    def get(self, options: dict[str, Any]) -> Any:
        import sglang

        if options != self._options:
            self.close()
            self._engine, self._options = sglang.Engine(**options), options
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def _run(engine: Any, run: dict[str, Any]) -> dict[str, Any]:
    prompts, sampling = run["prompts"], _sampling(run["sampling"])
    size = run["group_size"] or len(prompts)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    # Kernels that are compiled at their first use are not what is measured.
    engine.generate(input_ids=groups[0], sampling_params=sampling)
    start = time.perf_counter()
    outputs = [
        output
        for group in groups
        for output in engine.generate(input_ids=group, sampling_params=sampling)
    ]
    seconds = time.perf_counter() - start
    facts = [output["meta_info"] for output in outputs]
    counted = _accepted(facts, run["depth"] if run["head"] else 0)
    return {
        "answers": [
            {
                "token_ids": list(output["output_ids"]),
                "finish_reason": output["meta_info"]["finish_reason"]["type"],
            }
            for output in outputs
        ],
        "num_drafts": counted[0],
        "accepted_at_position": counted[1:],
        "counting": "verified",
        "cycles": sum(fact.get("spec_verify_ct", 0) for fact in facts),
        "seconds": seconds,
    }


def _accepted(facts: list[dict[str, Any]], depth: int) -> list[int]:
    """Passes with drafts, then those that accepted one at least, two at least and so on."""
    histograms = [fact.get(_HISTOGRAM) or fact.get(_OLDER_HISTOGRAM) or [] for fact in facts]
    return [sum(sum(one[least:]) for one in histograms) for least in range(depth + 1)]


def _options(run: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model_path": run["target"],
        "dtype": run["dtype"],
        "context_length": run["max_model_len"],
        "max_running_requests": run["max_requests"],
        "mem_fraction_static": run["memory_share"],
        "disable_radix_cache": True,
    }
    if run["head"]:
        is_chain = run["width"] == 1
        options |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": run["head"],
            "speculative_num_steps": run["depth"],
            "speculative_eagle_topk": run["width"],
            # The root is counted here, unlike everywhere else.
            "speculative_num_draft_tokens": (run["depth"] if is_chain else run["num_nodes"]) + 1,
        }
    return {**options, **run["engine_options"]}


def _sampling(asked: dict[str, Any]) -> dict[str, Any]:
    names = {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "ignore_eos": "ignore_eos",
    }
    chosen = {theirs: asked[ours] for ours, theirs in names.items()}
    chosen["top_k"] = asked["top_k"] or -1
    if asked["stop"]:
        chosen["stop"] = asked["stop"]
    if asked["stop_token_ids"]:
        chosen["stop_token_ids"] = asked["stop_token_ids"]
    if asked["logit_bias"]:
        chosen["logit_bias"] = asked["logit_bias"]
    if asked["seed"] is not None:
        chosen["sampling_seed"] = asked["seed"]
    return chosen


if __name__ == "__main__":
    main()
