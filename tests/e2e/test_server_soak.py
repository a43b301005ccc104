"""Five minutes of 200 streams beside clients that misbehave; the tool says what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_nothing_leaks(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "soak_server.py"), "--streams", "200"]
    command += ["--seconds", "300", "--out", str(tmp_path / "soak.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
