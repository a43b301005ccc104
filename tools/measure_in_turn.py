"""Several measurements in one process: a target that several of them want is loaded once.

    python tools/measure_in_turn.py "profile_cycles --shape llama-8b --out A.json" \
        "measure_overlap --shape llama-8b --out B.json"

Each word is a tool of this folder with its options. One that fails is said and does not stop the
others; the exit status is then 1.
"""

import gc
import importlib
import shlex
import sys
import time
import traceback

import torch


def main() -> None:
    failed = []
    for command in sys.argv[1:]:
        tool, *words = shlex.split(command)
        print(f"== {command}", flush=True)
        started = time.perf_counter()
        # What a result says it was made by.
        sys.argv = [f"tools/{tool}.py", *words]
        try:
            importlib.import_module(tool).main(words)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(tool)
        print(f"== {tool} took {time.perf_counter() - started:.0f} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
