"""kill -9 at any moment costs time and nothing else."""

import json
import sys
from pathlib import Path

import pytest

from fledge.features.feature_store import FeatureStore
from tests.warm_programs import WarmPrograms


@pytest.mark.parametrize("num_kills", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_captures_killed_at_random_moments_end_with_the_same_bytes(
    warm: WarmPrograms, tmp_path: Path, num_kills: int
) -> None:
    program = [sys.executable, "-m", "tests.unit.features.kill_capture", tmp_path, "5"]
    done = warm.run([*program, num_kills], text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["killed"] == num_kills
    assert told["resumed"] >= num_kills // 6
    unbroken, killed = tmp_path / "unbroken", tmp_path / "out"
    names = {path.name for path in unbroken.iterdir()}
    # A killed run may leave half a file behind under a hidden name.
    assert names == {path.name for path in killed.iterdir() if not path.name.endswith(".tmp")}
    for name in names - {"manifest.json"}:
        assert (killed / name).read_bytes() == (unbroken / name).read_bytes(), name
    stores = [FeatureStore.open(directory) for directory in (unbroken, killed)]
    assert stores[0].manifest.fingerprint == stores[1].manifest.fingerprint
    stores[1].verify()
