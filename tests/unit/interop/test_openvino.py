"""Heads for OpenVINO: the embedding comes along, and what it cannot express is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fledge.contracts.errors import ConfigError, EngineError, MismatchError
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.engines.installation import InstalledEngine, find_engine
from fledge.interop.engines.openvino_models import convert_models, name_layers
from fledge.interop.export import export_head
from fledge.interop.import_head import import_head
from fledge.models.head_files import load_head, save_head
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.unit.models.head_on_disk import assert_same

MODEL = target_of(tiny_model("llama", num_hidden_layers=4, vocab_size=len(tiny_tokenizer())))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("openvino") / "target", num_hidden_layers=12)


def saved(directory: Path, **flags: Any) -> Path:
    save_head(tiny_head(MODEL, **flags), directory)
    return directory


def test_the_targets_embedding_comes_along(tmp_path: Path, target: Path) -> None:
    tuned = TunedSettings(tree=TreeSettings(depth=5))
    report = export_head(
        saved(tmp_path / "head"),
        tmp_path / "out",
        "openvino",
        target=str(target),
        tuned=tuned,
        verify=True,
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(stored["embed_tokens.weight"], embedding)
    assert f"--model {target} {tmp_path}/out/target-ir && optimum-cli" in report.serve_command
    assert f"--model {tmp_path}/out {tmp_path}/out/head-ir && sed -i " in report.serve_command
    assert 'hidden_layers_list value="1 5 8"' in report.serve_command
    assert any("num_assistant_tokens=5" in note for note in report.notes)


def test_a_heads_own_embedding_is_kept(tmp_path: Path, target: Path) -> None:
    head = tiny_head(MODEL)
    head.own_embedding = torch.randn(MODEL.vocab_size, MODEL.hidden_size)
    save_head(head, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", "openvino", target=str(target), verify=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], head.own_embedding)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"taps": (0, 6, 9)}, r"outputs of layers; this head reads \[0, 6, 9\], and 0 is the emb"),
        ({"taps": (6, 2, 9)}, r"in that order; OpenVINO GenAI"),
        ({"norm_before_residual": True}, "norm_before_residual is true"),
        (
            {"norm_before_fc": True},
            "before fc.*OpenVINO GenAI does.* as GGUF, or train with head.norm_b",
        ),
        ({"fc_norm": True}, "norms of EAGLE-3.1"),
    ],
)
def test_what_it_cannot_express_is_refused(
    tmp_path: Path, target: Path, flags: dict[str, Any], message: str
) -> None:
    head = saved(tmp_path / "head", **flags)
    with pytest.raises(MismatchError, match=message):
        export_head(head, tmp_path / "out", "openvino", target=str(target))
    assert not (tmp_path / "out").exists()


def test_a_target_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the target with --target"):
        export_head(saved(tmp_path / "head"), tmp_path / "out", "openvino")


def test_the_layers_are_named_in_the_converted_head(tmp_path: Path, target: Path) -> None:
    export_head(saved(tmp_path / "head"), tmp_path / "out", "openvino", target=str(target))
    converted = tmp_path / "head-ir"
    converted.mkdir()
    file = converted / "openvino_model.xml"
    file.write_text('<net><rt_info><eagle3_mode value="True" /></rt_info></net>')
    name_layers(tmp_path / "out", converted)
    mode = '<eagle3_mode value="True" /><hidden_layers_list value="1 5 8" />'
    assert file.read_text() == f"<net><rt_info>{mode}</rt_info></net>"
    file.write_text("<net></net>")
    with pytest.raises(EngineError, match="is not marked as an EAGLE-3 head"):
        name_layers(tmp_path / "out", converted)


def test_a_conversion_that_fails_is_quoted(tmp_path: Path) -> None:
    here = InstalledEngine(name="openvino", python=Path(sys.executable), version="0")
    with pytest.raises(EngineError, match="could not convert the models: .*No module named 'opt"):
        convert_models(here, {tmp_path: tmp_path / "ir"})


def test_its_converter_is_installed_with_it() -> None:
    with pytest.raises(ConfigError, match="pip install openvino-genai optimum-intel"):
        find_engine("openvino")


@pytest.mark.parametrize("flags", [{}, {"num_heads": 8, "num_kv_heads": 4}], ids=str)
def test_there_and_back(tmp_path: Path, target: Path, flags: dict[str, Any]) -> None:
    """The embedding that the format wants is the target's, and shared again."""
    head = saved(tmp_path / "head", taps=(2, 5, 9), **flags)
    export_head(head, tmp_path / "out", "openvino", target=str(target), verify=True)
    import_head(tmp_path / "out", tmp_path / "back", target=str(target))
    assert_same(load_head(tmp_path / "back"), load_head(head))
