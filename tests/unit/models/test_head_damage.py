"""Heads that are damaged or not what they say: nothing is skipped, guessed or run quietly.

Catches: a tensor that is ignored or left at random, a vocabulary map that points outside the target
or twice at one token, code inside a pickle that is run, and an error that says "shape mismatch"
without saying which two shapes.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model
from tests.unit.models.head_on_disk import CONFIG, WEIGHTS, Files, assert_same


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle3Head:
    return tiny_head(target)


@pytest.fixture
def files(tmp_path: Path, head: Eagle3Head) -> Files:
    return Files(tmp_path / "head", head)


def test_missing_and_unknown_tensors_are_both_named(files: Files) -> None:
    files.rename(lambda name: "fc.wait" if name == "fc.weight" else name)
    with pytest.raises(MismatchError) as caught:
        files.load()
    assert "missing ['fc.weight'], unknown ['fc.wait']" in str(caught.value)
    assert str(files.directory) in str(caught.value)


def test_a_second_layer_is_not_ignored(files: Files) -> None:
    files.tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32)
    with pytest.raises(
        MismatchError, match=r"missing none, unknown \['layers.1.mlp.up_proj.weight'\]"
    ):
        files.load()


def test_a_flag_without_its_tensors_and_tensors_without_their_flag(
    files: Files, target: Target, tmp_path: Path
) -> None:
    files.config["fc_norm"] = True
    with pytest.raises(MismatchError, match=r"missing \['fc_norm.0.weight'"):
        files.load()
    other = Files(tmp_path / "other", tiny_head(target, norm_before_fc=True))
    other.config |= {"norm_before_fc": False, "eagle_config": {}}
    with pytest.raises(MismatchError, match=r"unknown \['input_norm.weight'\]"):
        other.load()


def test_wrong_shapes_name_both(files: Files) -> None:
    files.tensors["midlayer.self_attn.k_proj.weight"] = torch.zeros(32, 64)
    with pytest.raises(MismatchError) as caught:
        files.load()
    message = str(caught.value)
    assert "midlayer.self_attn.k_proj.weight" in message
    assert "has shape [32, 64]" in message
    assert "implies [16, 64]" in message


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fc.weight", "model.fc.weight"),
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("d2t", "model.d2t"),
    ],
)
def test_two_names_of_one_tensor_are_both_named(files: Files, name: str, other: str) -> None:
    files.tensors[other] = files.tensors[name].clone()
    with pytest.raises(MismatchError, match=r"are names of the same tensor .*; remove") as caught:
        files.load()
    assert repr(name) in str(caught.value)
    assert repr(other) in str(caught.value)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_quantised_weights_are_refused(files: Files, name: str, dtype: torch.dtype) -> None:
    files.tensors[name] = torch.zeros(64, 32, dtype=dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(MismatchError, match=f"{name} in .* is of type {kind}; the weights of"):
        files.load()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "unsupported operand"),
        ({"hidden_size": 10**30}, ""),
    ],
)
def test_configs_that_no_head_can_be_built_from(
    files: Files, change: dict[str, Any], reason: str
) -> None:
    files.config |= change
    with pytest.raises(ArtifactError, match="describes a head that cannot be built") as caught:
        files.load()
    assert str(files.directory / CONFIG) in str(caught.value)
    assert reason in str(caught.value)


def test_draft_ids_out_of_range(files: Files) -> None:
    files.tensors["d2t"][-1] = 97 - 63
    with pytest.raises(MismatchError, match=r"maps to target ids \d+ to 97; .* ids 0 to 96"):
        files.load()
    files.tensors["d2t"][:] = 0
    files.tensors["d2t"][0] = -1
    with pytest.raises(MismatchError, match="maps to target ids -1 to 63"):
        files.load()


def test_draft_ids_that_meet(files: Files) -> None:
    files.tensors["d2t"][1] = files.tensors["d2t"][0] - 1
    with pytest.raises(MismatchError, match="maps two draft tokens to one target id"):
        files.load()


def test_draft_table_of_the_wrong_length(files: Files) -> None:
    files.tensors["d2t"] = files.tensors["d2t"][:-1].clone()
    with pytest.raises(MismatchError, match=r"has shape \[63\]; draft_vocab_size says \[64\]"):
        files.load()


def test_a_reduced_vocabulary_needs_its_table(files: Files) -> None:
    del files.tensors["d2t"]
    with pytest.raises(ArtifactError, match="no d2t table, but a draft vocabulary of 64 .* of 97"):
        files.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_draft_table_of_the_wrong_type(files: Files, dtype: torch.dtype) -> None:
    files.tensors["d2t"] = files.tensors["d2t"].to(dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(MismatchError, match=rf"d2t in .* is of type {kind}; .* \(int64\)"):
        files.load()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_draft_tables_of_narrow_integers(
    files: Files, head: Eagle3Head, dtype: torch.dtype
) -> None:
    files.tensors["d2t"] = files.tensors["d2t"].to(dtype)
    assert_same(files.load(), head)


@pytest.mark.parametrize("shape", [(96,), (97, 1), (64,)])
def test_member_table_of_the_wrong_shape(files: Files, shape: tuple[int, ...]) -> None:
    files.tensors["t2d"] = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(MismatchError) as caught:
        files.load()
    assert f"has shape {list(shape)}; vocab_size says [97]" in str(caught.value)


def test_member_table_of_the_wrong_type(files: Files, head: Eagle3Head) -> None:
    members = files.tensors["t2d"]
    files.tensors["t2d"] = members.to(torch.uint8)
    assert_same(files.load(), head)
    for wrong, kind in (
        (members.to(torch.uint8) * 2, "uint8, up to 2"),
        (members.float(), "float"),
    ):
        files.tensors["t2d"] = wrong
        with pytest.raises(MismatchError, match=f"t2d in .* is of type {kind}.* must be bool"):
            files.load()


def test_a_member_table_alone_is_checked_too(tmp_path: Path, target: Target) -> None:
    files = Files(tmp_path / "head", tiny_head(target, draft_vocab_size=97))
    del files.tensors["d2t"]
    files.tensors["t2d"][5] = False
    with pytest.raises(MismatchError, match="t2d and d2t in .* name different tokens"):
        files.load()


def test_tables_that_disagree(files: Files) -> None:
    outside = int((~files.tensors["t2d"]).nonzero()[0])
    inside = int(files.tensors["t2d"].nonzero()[0])
    files.tensors["t2d"][outside], files.tensors["t2d"][inside] = True, False
    with pytest.raises(MismatchError, match="t2d and d2t in .* name different tokens"):
        files.load()


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_safetensors(files: Files, keep: int) -> None:
    path = files.directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match="is damaged or truncated") as caught:
        load_head(files.directory)
    assert str(path) in str(caught.value)


def test_truncated_pickle(files: Files) -> None:
    path = files.write_pickle(files.tensors)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ArtifactError, match="pytorch_model.bin is damaged or truncated"):
        load_head(files.directory)


class _Intruder:
    """A pickle that leaves a file behind when somebody unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_code_in_a_pickle_is_refused_and_not_run(files: Files, tmp_path: Path) -> None:
    trace = tmp_path / "was here"
    files.write_pickle({"fc.weight": _Intruder(trace)})
    with pytest.raises(ArtifactError, match="does not hold plain weights: UnpicklingError"):
        load_head(files.directory)
    assert not trace.exists()
    pickle.loads(pickle.dumps(_Intruder(trace)))
    assert trace.exists(), "the intruder would have left a trace"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "it is a list, not a table of tensors by name"),
        ({"state_dict": {"fc.weight": torch.ones(1)}}, "the entry 'state_dict' is a dict"),
        ({"fc.weight": 3}, "the entry 'fc.weight' is a int; every entry must be a tensor"),
        ({7: torch.ones(1)}, "the entry 7 is a Tensor; every entry must be a tensor under a name"),
    ],
)
def test_a_pickle_of_something_else(files: Files, content: object, message: str) -> None:
    path = files.write_pickle(content)
    with pytest.raises(ArtifactError) as caught:
        load_head(files.directory)
    assert f"{path} does not hold plain weights: {message}" in str(caught.value)


def test_a_missing_shard_is_named(files: Files) -> None:
    index = files.split()
    missing = files.directory / "model-00002-of-00002.safetensors"
    missing.unlink()
    with pytest.raises(ArtifactError, match="names the file .*, which is missing") as caught:
        load_head(files.directory)
    assert str(index) in str(caught.value)
    assert missing.name in str(caught.value)


def test_shards_hold_what_their_index_says(files: Files) -> None:
    index = files.split()
    entries = json.loads(index.read_text())["weight_map"]
    moved = {name: file for name, file in entries.items() if name != "fc.weight"}
    index.write_text(json.dumps({"weight_map": moved | {"fc.wait": entries["fc.weight"]}}))
    with pytest.raises(MismatchError, match=r"missing \['fc.wait'\], unknown \['fc.weight'\]"):
        load_head(files.directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{nope", "is not an index of weight files"),
        ("[]", "is not an index of weight files"),
        ('{"weight_map": {"fc.weight": 3}}', "is not an index of weight files"),
        ('{"weight_map": {}}', "must name files beside it"),
        ('{"weight_map": {"fc.weight": "../secret.safetensors"}}', "must name files beside it"),
    ],
)
def test_a_bad_index_of_shards(files: Files, content: str, message: str) -> None:
    files.split().write_text(content)
    with pytest.raises(ArtifactError, match=message):
        load_head(files.directory)


def test_a_head_that_needs_the_targets_lm_head_says_how_to_get_it(files: Files) -> None:
    del files.tensors["lm_head.weight"]
    with pytest.raises(ArtifactError, match="has no lm_head.weight: .* fledge import .* --target"):
        files.load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{nope", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1, 2]", "holds a list, not an object"),
    ],
)
def test_bad_json(files: Files, content: bytes, message: str) -> None:
    (files.directory / CONFIG).write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as caught:
        load_head(files.directory)
    assert str(files.directory / CONFIG) in str(caught.value)


def test_missing_parts(files: Files, head: Eagle3Head, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there is no head directory .*nowhere"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"config\.json is a file; give the directory"):
        load_head(files.directory / CONFIG)
    (files.directory / WEIGHTS).unlink()
    with pytest.raises(ArtifactError, match="neither model.safetensors nor pytorch_model.bin"):
        load_head(files.directory)
    (files.directory / CONFIG).unlink()
    with pytest.raises(ArtifactError, match="has no config.json; it is not a head directory"):
        load_head(files.directory)
    Files(files.directory / "train", head)
    with pytest.raises(ArtifactError, match=r"the head of this run is .*train\."):
        load_head(files.directory)
    (files.directory / "plan.json").write_text("{}")
    with pytest.raises(ArtifactError, match="a run in it is unfinished: start it again as before"):
        load_head(files.directory)
