"""The tool that measures capture runs on a CPU too, and says what it should."""

import importlib
import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


def test_every_way_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    out = tmp_path / "figures.json"
    words = "--shape tiny --device cpu --tokens 300 --median-len 30 --pass-tokens 128 --rounds 1"
    importlib.import_module("measure_capture").main(
        [*words.split(), "--formats", "exact,q5", "--work", str(tmp_path), "--out", str(out)]
    )
    document = json.loads(out.read_text())
    ways = {"transformers", "decoder", "logits", "exact coded", "exact", "q5 coded", "q5"}
    assert set(document["tokens_per_s"]) == ways
    assert document["of_decoder"]["decoder"] == 1.0
    assert document["writing"]["q5"]["shard_bytes_per_s"] > 0
    assert document["writing"]["q5"]["plain_bytes_per_s"] > 0
    assert document["num_tokens"] >= 300 - 2 * document["num_passes"] * 8
    assert {"date", "commit", "command", "device", "packages"} <= document["provenance"].keys()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
