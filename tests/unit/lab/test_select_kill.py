"""kill -9 at any moment costs a selection one visit at most."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NUM_KILLS = 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_selections_killed_at_random_moments_end_with_the_same_figures(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.unit.lab.kill_select", tmp_path, "5"]
    done = subprocess.run(
        [*program, str(NUM_KILLS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["killed"] == NUM_KILLS
    assert told["resumed"] >= 2
    unbroken, killed = tmp_path / "unbroken", tmp_path / "out"
    name = "measurements.journal"
    assert (killed / name).read_bytes() == (unbroken / name).read_bytes()
    cards = [json.loads((one / "scorecard.json").read_text()) for one in (unbroken, killed)]
    for card in cards:
        del card["provenance"]
    assert cards[0] == cards[1]
