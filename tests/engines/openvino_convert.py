"""Runs in OpenVINO's environment: what `optimum-cli export openvino` does, several times at once.

python openvino_convert.py MODEL OUT [MODEL OUT ...]
"""

import sys

from optimum.exporters.openvino import main_export


def main() -> None:
    words = sys.argv[1:]
    for model, out in zip(words[::2], words[1::2], strict=True):
        main_export(model, output=out, task="text-generation-with-past", trust_remote_code=True)


if __name__ == "__main__":
    main()
