"""Answers prompts in SGLang; runs in SGLang's own environment, which needs a GPU.

    python sglang_runner.py JOB.json RESULT.json

Job and result are those of `fledge.interop.engines.job`. SGLang tells of each answer how many
verify passes it took, and not at which position drafts were accepted: those counts stay empty.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    runs = [_run(one) for one in job["runs"]]
    result = {"version": importlib.metadata.version("sglang"), "runs": runs}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _run(run: dict[str, Any]) -> dict[str, Any]:
    import sglang

    engine = sglang.Engine(**_options(run))
    start = time.perf_counter()
    outputs = engine.generate(input_ids=run["prompts"], sampling_params=_sampling(run["sampling"]))
    seconds = time.perf_counter() - start
    engine.shutdown()
    passes = sum(output["meta_info"].get("spec_verify_ct", 0) for output in outputs)
    return {
        "answers": [
            {
                "token_ids": output["output_ids"],
                "finish_reason": output["meta_info"]["finish_reason"]["type"],
            }
            for output in outputs
        ],
        "num_drafts": 0,
        "accepted_at_position": [],
        "counting": "verified",
        "cycles": passes,
        "seconds": seconds,
    }


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
    return options


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
