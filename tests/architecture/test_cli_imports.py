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
exit_code = main(sys.argv[1:])
heavy = [name for name in {_HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else exit_code)
"""
_LIMIT_CPU_S = 1.5
"""Of processor time, which a busy machine does not stretch much; torch alone takes more."""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
)
def test_help_is_instant_and_imports_nothing_heavy(words: list[str]) -> None:
    before = os.times()
    process = subprocess.run(
        [sys.executable, "-c", _PROBE, *words], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    after = os.times()
    used_s = after.children_user + after.children_system
    used_s -= before.children_user + before.children_system
    assert used_s < _LIMIT_CPU_S
    if words[0] in VERBS:
        assert f"Example: fledge {words[0]}" in process.stdout
