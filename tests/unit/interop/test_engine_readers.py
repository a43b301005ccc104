"""The readers that follow the engines' rules refuse what those engines would misread quietly.

SGLang was not run here: its reader encodes the loading rules of its source (0.5.17:
models/llama_eagle3.py, model_runner_components/spec_aux_hidden_state.py, eagle_worker_v2.py), and
these tests are their statement.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.contracts.errors import FledgeError
from fledge.interop.eagle_reader import read_as_eagle
from fledge.interop.export import export_head
from fledge.interop.sglang_reader import read_as_sglang
from fledge.interop.vllm_reader import read_as_vllm
from tests.unit.interop.head_cases import IDS, write_head

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("readers")
    head = write_head(root / "head", taps=(1, 3, 6))
    export_head(head, root / "vllm", "vllm")
    export_head(head, root / "sglang", "sglang")
    export_head(head, root / "speculators", "speculators")
    export_head(write_head(root / "plain"), root / "eagle", "eagle")
    return root


def changed(source: Path, place: Path, change: Change) -> Path:
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
    return place


def test_one_config_serves_both_engines(exported: Path) -> None:
    """Both keys are there, each in its own counting: either engine hands over the same layers."""
    assert read_as_vllm(exported / "sglang").taps == (1, 3, 6)
    assert read_as_sglang(exported / "vllm").taps == (1, 3, 6)


def only_eagle_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config[IDS]


def swapped(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config[IDS] = [3, 1, 6]


def two_taps(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["num_aux_hidden_states"] = 2


def prefixed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.fc.weight"] = tensors.pop("fc.weight")


def without_norm(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["norm.weight"]


def with_biases(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["attention_bias"] = True


def other_class(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["architectures"] = ["GemmaForCausalLM"]


def short_table(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (only_eagle_ids, "where vLLM's runners disagree"),
        (swapped, r"hands over \[1, 3, 6\] for layers \[3, 1, 6\]"),
        (two_taps, "fc reads 2 taps"),
        (prefixed, "gets a second model."),
        (without_norm, r"missing \['norm.weight'\]"),
        (with_biases, "a bias of o_proj exactly when"),
        (other_class, "vLLM has no architecture Eagle3GemmaForCausalLM"),
        (short_table, "d2t has"),
    ],
)
def test_vllm(exported: Path, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(FledgeError, match=message):
        read_as_vllm(changed(exported / "vllm", tmp_path / "x", change))


def residual_normed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["norm_before_residual"] = True


def unknown_tensor(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8)


def own_embedding(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(97, 32)


def tied(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["tie_word_embeddings"] = True


def no_draft_size(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["draft_vocab_size"] = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (residual_normed, "residual is not normed"),
        (unknown_tensor, r"unknown \['midlayer.self_attn.q_norm.weight'\]"),
        (own_embedding, "replaces the head's own embedding"),
        (with_biases, "have no biases"),
        (other_class, "reads LlamaForCausalLMEagle3 only"),
        (two_taps, r"hands over \[1, 3, 6\]; fc reads 2 taps"),
        (tied, "logits would come from embeddings"),
        (no_draft_size, "no draft_vocab_size"),
    ],
)
def test_sglang(exported: Path, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(FledgeError, match=message):
        read_as_sglang(changed(exported / "sglang", tmp_path / "x", change))


def test_sglang_takes_layer_ids_from_one_place_only(exported: Path, tmp_path: Path) -> None:
    """At the top level they are not even looked at: it would quietly hand over the default."""

    def only_top(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config["eagle_config"][IDS]

    place = changed(exported / "sglang", tmp_path / "x", only_top)
    assert read_as_sglang(place).taps is None


def test_names_that_sglang_also_knows(exported: Path, tmp_path: Path) -> None:
    def renamed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors["model." + name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    assert read_as_sglang(changed(exported / "sglang", tmp_path / "x", renamed)).head


def test_sglang_leaves_fc_out_of_taps_as_wide_as_the_hidden_state(
    exported: Path, tmp_path: Path
) -> None:
    """It tells target states from the head's own by their width alone."""

    def one_tap(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["num_aux_hidden_states"] = 1
        config["eagle_config"][IDS] = [2]

    with pytest.raises(FledgeError, match="leaves fc out"):
        read_as_sglang(changed(exported / "sglang", tmp_path / "x", one_tap))


@pytest.mark.parametrize("flag", ["fc_norm", "use_aux_norm"])
def test_sglang_reads_the_norms_of_eagle_3_1(tmp_path: Path, flag: str) -> None:
    """By their names of today and of before."""
    head = write_head(tmp_path / "head", fc_norm=True, norm_output=True)
    export_head(head, tmp_path / "out", "sglang", verify=True)

    def older(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config["fc_norm"]
        config[flag] = True
        for number, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{number}.weight")

    read = read_as_sglang(changed(tmp_path / "out", tmp_path / "x", older)).head
    assert read.config.fc_norm
    assert read.config.norm_output
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read.state_dict()["fc_norm.2.weight"], stored["fc_norm.2.weight"])


def test_draft_tokens_are_differences_in_both_engines(exported: Path) -> None:
    offsets = load_file(exported / "sglang" / "model.safetensors")["d2t"]
    expected = torch.arange(len(offsets)) + offsets
    assert torch.equal(read_as_sglang(exported / "sglang").head.draft_to_target_V, expected)
    assert torch.equal(read_as_vllm(exported / "vllm").head.draft_to_target_V, expected)


def with_target_size(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["target_hidden_size"] = 32


def with_flag(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["norm_output"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_target_size, "with target_hidden_size the embedding must be in the file"),
        (with_flag, "does not know norm_output"),
        (without_norm, r"missing \['norm.weight'\]"),
    ],
)
def test_eagle(exported: Path, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(FledgeError, match=message):
        read_as_eagle(changed(exported / "eagle", tmp_path / "x", change))


def test_what_differs_from_the_head_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that goes wrong is not kept: here its layers are written one off."""
    real = json.dumps

    def one_off(data: Any, **options: Any) -> str:
        if isinstance(data, dict) and IDS in data:
            data = data | {IDS: [number + 1 for number in data[IDS]]}
        return real(data, **options)

    head = write_head(tmp_path / "head", taps=(1, 3, 6))
    monkeypatch.setattr("fledge.interop.checkpoint_files.json.dumps", one_off)
    with pytest.raises(FledgeError, match=r"states after \(2, 4, 7\) .* reads \(1, 3, 6\)"):
        export_head(head, tmp_path / "out", "vllm", verify=True)
    assert not (tmp_path / "out").exists()
