"""Exports: what is written, what is refused, and that nothing is ever damaged."""

from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError
from fledge.interop.export import export_head
from fledge.models.head_files import load_head, save_head
from fledge.testing import target_of, tiny_head, tiny_model
from tests.unit.models.head_on_disk import assert_same

TARGET = target_of(tiny_model("llama", num_hidden_layers=8))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_head(tiny_head(TARGET), tmp_path / "head")
    return tmp_path / "head"


def test_a_head_for_vllm_is_the_same_head(head: Path, tmp_path: Path) -> None:
    report = export_head(head, tmp_path / "out", "vllm")
    assert_same(load_head(report.directory), load_head(head))
    assert set(report.files) >= {"config.json", "model.safetensors"}


def test_what_is_there_already_stays(head: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "precious.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="exists already"):
        export_head(head, place, "vllm")
    assert [path.name for path in place.iterdir()] == ["precious.txt"]
