"""Ways of decoding take turns on engines that serve all sizes; what is found is on the disk."""

import json
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import measure_decoding

    module: ModuleType = measure_decoding
    return module


def test_cells_of_every_size_and_way(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    real, tried = tool.Bench.engine, []

    def little_memory(self: object, way: str, size: int) -> object:
        tried.append((way, size))
        if way == "3x1x3" and size > 2:
            raise tool.CapacityError("no room")
        return real(self, way, size)

    monkeypatch.setattr(tool.Bench, "engine", little_memory)
    out = tmp_path / "found.json"
    words = "--shape tiny --device cpu --dtype float32 --rate 0.9,0.5 --ways plain,3x1x3"
    lengths = "--sizes 1,2,3 --answer-len 6 --warm-len 2 --rounds 2"
    tool.main([*words.split(), *lengths.split(), "--out", str(out)])
    assert tried == [("plain", 3), ("3x1x3", 3), ("3x1x3", 2)]
    found = json.loads(out.read_text())
    assert {size: sorted(ways) for size, ways in found["cells"].items()} == {
        "1": ["3x1x3", "plain"],
        "2": ["3x1x3", "plain"],
        "3": ["plain"],
    }
    chain = found["cells"]["2"]["3x1x3"]
    assert len(chain["seconds"]) == 2
    assert chain["tokens_per_s"] == pytest.approx(2 * 6 / min(chain["seconds"]))
    assert chain["over_plain"]["low"] <= chain["over_plain"]["ratio"] <= chain["over_plain"]["high"]
    assert chain["accept_length"] > 1.0
    assert found["cells"]["3"]["plain"]["accept_length"] == 1.0
    assert "over_plain" not in found["cells"]["3"]["plain"]


def test_a_ratio_of_rounds_by_turns(tool: ModuleType) -> None:
    found = tool.ratio_of([2.0, 2.2, 2.1, 9.0], [1.0, 1.1, 1.0, 1.0])
    assert found["ratio"] == pytest.approx(2.15)
    assert found["low"] < found["ratio"] < found["high"]
