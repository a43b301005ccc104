"""The engine's kernels compile for real devices and fit into a processor's memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
SHARED_BYTES = {90: 227 * 1024, 89: 99 * 1024}


@pytest.mark.parametrize(
    ("module", "num_kernels"), [("kernels_for_devices", 22), ("cycle_kernels_for_devices", 6)]
)
def test_kernels_compile_and_fit(module: str, num_kernels: int, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.ops.{module}"],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == num_kernels
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[kernel["capability"]], kernel["name"]
