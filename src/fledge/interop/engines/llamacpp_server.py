"""Serves a GGUF pair over llama.cpp's own OpenAI-like API; runs in an environment with xllamacpp.

FLEDGE_API_KEYS=key,key python llamacpp_server.py --model FILE [--head FILE --depth N] ...
"""

import argparse
import os
import signal
import sys
import threading

KEYS_VARIABLE = "FLEDGE_API_KEYS"


def main() -> None:
    import xllamacpp

    options = _parse()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.model_alias = set(options.alias.split(","))
    parameters.hostnames, parameters.port = [options.host], options.port
    parameters.n_ctx, parameters.n_parallel = options.context, options.parallel
    parameters.use_jinja = True
    parameters.api_keys = [key for key in os.environ.pop(KEYS_VARIABLE, "").split(",") if key]
    if threads := int(os.environ.get("OMP_NUM_THREADS", 0)):
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    if options.head:
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
        parameters.speculative.types = [kind]
        parameters.speculative.draft.mparams.path = options.head
        parameters.speculative.draft.n_max = options.depth
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    server = xllamacpp.Server(parameters)
    sys.stderr.write(f"{options.alias} is served at {server.listening_address}/v1\n")
    sys.stderr.flush()
    stopped.wait()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--head")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
