"""`--help` answers at once: no verb's module pulls in torch or transformers."""

import os
import subprocess
import sys

import pytest

from fledge.cli.main import VERBS

_HEAVY = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub")
_PROBE = f"""
import sys
from fledge.cli.main import main
for words in sys.argv[1:]:
    exit_code = main(words.split())
    heavy = [name for name in {_HEAVY!r} if name in sys.modules]
    if heavy or exit_code:
        sys.exit(f"{{words}}: exit code {{exit_code}}, imported {{heavy}}")
"""
_LIMIT_CPU_S = 1.5
"""Of processor time, which a busy machine does not stretch much; torch alone takes more."""


def probe(*arguments: str) -> str:
    """What the program says to one line of arguments after the other, in one process."""
    process = subprocess.run(
        [sys.executable, "-c", _PROBE, *arguments], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


@pytest.mark.parametrize("words", ["--help", "--version", "train --help"])
def test_help_is_instant(words: str) -> None:
    before = os.times()
    probe(words)
    after = os.times()
    used_s = after.children_user + after.children_system
    used_s -= before.children_user + before.children_system
    assert used_s < _LIMIT_CPU_S


def test_no_verb_imports_anything_heavy_for_its_help() -> None:
    said = probe(*(f"{verb} --help" for verb in VERBS))
    for verb in VERBS:
        assert f"Example: fledge {verb}" in said
