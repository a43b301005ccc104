"""Answers prompts in vLLM; runs in vLLM's own environment, where fledge need not be installed.

    python vllm_runner.py JOB.json RESULT.json

Job and result are those of `fledge.interop.engines.job`; the result is written anew after every
run. Engines with the same turn start side by side and answer alone.
"""

import fcntl
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    job_file, result_file = (Path(name) for name in sys.argv[1:])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    turn = os.open(job["turn"], os.O_CREAT | os.O_RDWR) if job["turn"] else None
    _take(turn, fcntl.LOCK_SH)
    _say("loading vLLM")
    import torch
    import vllm

    loaded, runs = _Loaded(vllm), []
    is_cpu = not torch.cuda.is_available()
    for run in job["runs"]:
        _say("starting an engine, unless it is the one before")
        loaded.start(_options(run, is_cpu=is_cpu))
        _take(turn, fcntl.LOCK_EX)
        _say(f"answering {len(run['prompts'])} prompts, {run['group_size']} at a time")
        runs.append(_run(vllm, loaded.llm, run, is_cpu=is_cpu))
        _write(result_file, {"version": vllm.__version__, "runs": runs})
    _say("done")


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
    """The engine of the last run, kept for the next one where it is the same.

    Nobody else may keep `llm`: two of them would not fit into the memory, and the groups that one
    takes down when it goes are those of the next.
    """

    def __init__(self, vllm: Any) -> None:
        self._vllm = vllm
        self._options: dict[str, Any] | None = None
        self.llm: Any = None

    def start(self, options: dict[str, Any]) -> None:
        if options != self._options:
            self.llm = None
            gc.collect()
            self.llm, self._options = self._vllm.LLM(**options), options


def _run(vllm: Any, llm: Any, run: dict[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
    size = run["group_size"] or len(prompts)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    sampling = vllm.SamplingParams(**_sampling(run["sampling"]))
    if not is_cpu:  # kernels that are compiled at their first use are not what is measured
        llm.generate(groups[0], sampling, use_tqdm=False)
    before = _counters(llm)
    start = time.perf_counter()
    outputs = [out for group in groups for out in llm.generate(group, sampling, use_tqdm=False)]
    seconds = time.perf_counter() - start
    counted = [now - then for now, then in zip(_counters(llm), before, strict=True)]
    return {
        "answers": [
            {
                "token_ids": list(output.outputs[0].token_ids),
                "finish_reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ],
        "num_drafts": counted[0],
        "accepted_at_position": counted[1:][: run["depth"] if run["head"] else 0],
        "counting": "verified",
        "cycles": counted[0],
        "seconds": seconds,
    }


def _options(run: dict[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": run["target"],
        "dtype": run["dtype"],
        "max_model_len": run["max_model_len"],
        "max_num_seqs": run["max_requests"],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": not run["sampling"]["stop"],
        "disable_log_stats": False,
    }
    if is_cpu:
        # One process, nothing compiled: a CPU run is there to compare, not to be fast.
        options |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
    else:
        options["gpu_memory_utilization"] = run["memory_share"]
    if run["head"]:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": run["head"],
            "num_speculative_tokens": run["depth"],
        }
    return {**options, **run["engine_options"]}


def _sampling(asked: dict[str, Any]) -> dict[str, Any]:
    """Our names are vLLM's, and so is what they mean; text is made only where it can end one."""
    bias = {int(token): value for token, value in asked["logit_bias"].items()}
    stop = asked["stop"] or None
    return {**asked, "logit_bias": bias or None, "stop": stop, "detokenize": bool(stop)}


def _counters(llm: Any) -> list[int]:
    """Drafts, then accepted ones by position, as the engine has counted them so far."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    if _DRAFTS not in found:
        return [0]
    return [int(found[_DRAFTS].value), *(int(value) for value in found[_ACCEPTED].values)]


if __name__ == "__main__":
    main()
