"""Answers prompts in OpenVINO GenAI; runs in an environment with openvino-genai.

    python openvino_runner.py JOB.json RESULT.json

Target and head are directories of OpenVINO models, as optimum-intel's exporter writes them. Job and
result are those of `fledge.interop.engines.job`.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

# What a CPU would otherwise round: the cache to 8 bits, products to 16.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    runs = [_run(one) for one in job["runs"]]
    result = {"version": importlib.metadata.version("openvino-genai"), "runs": runs}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _run(run: dict[str, Any]) -> dict[str, Any]:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    options: dict[str, Any] = {"scheduler_config": scheduler, **_EXACT}
    if run["head"]:
        options["draft_model"] = openvino_genai.draft_model(run["head"], "CPU", **_EXACT)
    pipeline = openvino_genai.LLMPipeline(run["target"], "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = run["sampling"]["max_tokens"]
    config.do_sample = False
    config.ignore_eos = run["sampling"]["ignore_eos"]
    config.stop_token_ids = set(run["eos_token_ids"])
    config.eos_token_id = run["eos_token_ids"][0]
    config.apply_chat_template = False
    if run["head"]:
        config.num_assistant_tokens = run["depth"]
    answers, cycles, seconds = [], [], 0.0
    for prompt in run["prompts"]:
        start = time.perf_counter()
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        found = pipeline.generate(ids, config)
        seconds += time.perf_counter() - start
        reason = found.finish_reasons[0].name.lower()
        tokens = [int(token) for token in found.tokens[0]]
        answers.append({"token_ids": tokens, "finish_reason": reason})
        if run["head"]:
            # Tokens of each pass of the target. The first is the prompt's; of the last it cannot
            # be told whether the token that ended the answer was drafted.
            metrics = found.extended_perf_metrics.main_model_metrics
            cycles += [int(size) for size in metrics.raw_metrics.m_batch_sizes][1:-1]
    positions = range(run["depth"] if run["head"] else 0)
    return {
        "answers": answers,
        "num_drafts": len(cycles),
        "accepted_at_position": [sum(size > place + 1 for size in cycles) for place in positions],
        "counting": "all_but_last",
        "cycles": len(cycles) + (len(answers) if run["head"] else 0),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
