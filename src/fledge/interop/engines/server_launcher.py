"""Starts an engine's own server; runs in that engine's environment.

    FLEDGE_API_KEYS=key,key python server_launcher.py MODULE WORD...

Keys come through the environment and reach the engine inside this process, so that no list of
processes shows them.
"""

import os
import runpy
import sys

KEYS_VARIABLE = "FLEDGE_API_KEYS"


def main() -> None:
    module, *words = sys.argv[1:]
    keys = [key for key in os.environ.pop(KEYS_VARIABLE, "").split(",") if key]
    sys.argv = [module, *words, *(["--api-key", *keys] if keys else [])]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
