"""Turns models into OpenVINO's format; runs in an environment with optimum-intel.

    python openvino_converter.py MODEL OUT [MODEL OUT ...]

What `optimum-cli export openvino` does, for several models with one start.
"""

import sys

from optimum.exporters.openvino import main_export


def main() -> None:
    words = sys.argv[1:]
    for model, out in zip(words[::2], words[1::2], strict=True):
        main_export(model, output=out, task="text-generation-with-past", trust_remote_code=True)


if __name__ == "__main__":
    main()
