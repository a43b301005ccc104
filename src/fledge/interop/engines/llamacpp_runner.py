"""Answers prompts in llama.cpp; runs in an environment with xllamacpp, which is all of it.

    python llamacpp_runner.py JOB.json RESULT.json

Target and head are GGUF files. Job and result are those of `fledge.interop.engines.job`. Each token
is streamed with how many drafts there were so far, which shows where a cycle begins.
"""

import importlib.metadata
import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    runs = [_run(one) for one in job["runs"]]
    result = {"version": importlib.metadata.version("xllamacpp"), "runs": runs}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _run(run: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    key = secrets.token_hex(16)
    server = xllamacpp.Server(_parameters(xllamacpp, run, key))
    answers, num_cycles, counted, seconds, decoding_ms = [], 0, [], 0.0, 0.0
    for prompt in run["prompts"]:
        start = time.perf_counter()
        events = list(_stream(server.listening_address, key, _request(run, prompt)))
        seconds += time.perf_counter() - start
        last = events[-1]
        decoding_ms += last["timings"]["predicted_ms"]
        tokens = [token for event in events for token in event.get("tokens", ())]
        if len(tokens) != last["tokens_predicted"]:
            # Tokens that end inside a character are streamed with the next one, nameless.
            asked = {**_request(run, prompt), "stream": False}
            (whole,) = _stream(server.listening_address, key, asked)
            tokens = whole["tokens"]
        answers.append({"token_ids": tokens, "finish_reason": _finish_reason(last)})
        cycles = _accepted_in_cycles(events, run["depth"])
        num_cycles += len(cycles)
        counted += cycles[:-1]  # drafts may lie behind the end of an answer
    del server
    positions = range(run["depth"] if run["head"] else 0)
    return {
        "answers": answers,
        "num_drafts": len(counted),
        "accepted_at_position": [sum(one > place for one in counted) for place in positions],
        "counting": "all_but_last",
        "cycles": num_cycles,
        "seconds": seconds,
        "decoding_seconds": decoding_ms / 1000,
    }


def _parameters(xllamacpp: Any, run: dict[str, Any], key: str) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = run["target"]
    parameters.n_ctx, parameters.n_parallel = run["max_model_len"], 1
    parameters.api_keys = [key]
    parameters.warmup = False
    if threads := int(os.environ.get("OMP_NUM_THREADS", 0)):
        # Its threads wait by spinning: on a busy machine each one too many costs minutes.
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    draft = parameters.speculative.draft
    if run["head"]:
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
        parameters.speculative.types = [kind]
        draft.mparams.path = run["head"]
        draft.n_max, draft.n_min = run["depth"], 0
        draft.p_min = run["engine_options"].get("p_min", 0.0)
    if run["dtype"] == "float32":
        exact = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.cache_type_k = parameters.cache_type_v = exact
        draft.cache_type_k = draft.cache_type_v = exact
    return parameters


def _request(run: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    asked = run["sampling"]
    bias = [[int(token), value] for token, value in asked["logit_bias"].items()]
    return {
        "prompt": prompt,
        "n_predict": asked["max_tokens"],
        "temperature": asked["temperature"],
        "top_k": asked["top_k"],
        "top_p": asked["top_p"],
        "min_p": asked["min_p"],
        "repeat_penalty": asked["repetition_penalty"],
        "repeat_last_n": run["max_model_len"],
        "presence_penalty": asked["presence_penalty"],
        "frequency_penalty": asked["frequency_penalty"],
        "logit_bias": bias,
        "seed": asked["seed"] if asked["seed"] is not None else -1,
        "stop": asked["stop"],
        "ignore_eos": asked["ignore_eos"],
        "cache_prompt": False,
        "return_tokens": True,
        "timings_per_token": True,
        "stream": True,
    }


def _stream(address: str, key: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        f"{address}/completion",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request) as response:
            for line in response:
                text = line.removeprefix(b"data: ")
                if text.startswith(b"{"):
                    yield json.loads(text)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"llama.cpp answered {error.code}: {error.read().decode()}") from None


def _accepted_in_cycles(events: list[dict[str, Any]], depth: int) -> list[int]:
    """Accepted drafts of each cycle: tokens of one cycle come with the same count of drafts.

    Where all tokens of a cycle end inside a character it is not seen; what it shares with the next
    one is divided between them.
    """
    reached, cycles = (0, 0), []
    for event in events:
        timings = event.get("timings") or {}
        now = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
        if now[0] > reached[0]:
            drafts, accepted = now[0] - reached[0], now[1] - reached[1]
            count = -(-drafts // depth)
            cycles += [(accepted + number) // count for number in range(count)]
            reached = now
    return cycles


def _finish_reason(last: dict[str, Any]) -> str:
    return "length" if last.get("stop_type") == "limit" else "stop"


if __name__ == "__main__":
    main()
