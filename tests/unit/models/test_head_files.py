"""Heads on disk: what is written is read back bit for bit, in every layout of the field.

Catches: a flag that is not written (the head would load and draft badly), a layout of another
project that is misread, a save that leaves half a head or replaces one, and a head of another
target.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fledge import Engine, SamplingParams
from fledge.contracts.errors import ArtifactError, CapacityError, FledgeError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import fit_to_target, load_head, save_head
from fledge.models.target import Target
from fledge.store.capacity import format_bytes
from fledge.testing import target_of, tiny_head, tiny_model
from tests.unit.models.head_on_disk import CONFIG, WEIGHTS, Files, assert_same

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle3Head:
    return tiny_head(target)


@pytest.fixture
def files(tmp_path: Path, head: Eagle3Head) -> Files:
    return Files(tmp_path / "head", head)


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=len(FLAGS))))
def test_every_combination_of_flags_survives(
    tmp_path: Path, target: Target, values: tuple[bool, ...]
) -> None:
    head = tiny_head(target, **dict(zip(FLAGS, values, strict=True)))
    save_head(head, tmp_path / "head")
    assert_same(load_head(tmp_path / "head"), head)


VARIANTS: list[dict[str, Any]] = [
    {"taps": (1, 2, 3)},
    {"taps": (0, 2, 4)},
    {"taps": (1, 3), "num_taps": 2},
    {"taps": (0, 1, 2, 3, 4), "num_taps": 5, "fc_norm": True},
    {"sliding_window": 12},
    {"qk_norm": True},
    {"qk_norm": True, "sliding_window": 12, "norm_before_residual": True},
    {"attention_bias": True, "output_bias": True},
    {"draft_vocab_size": 97},
    {"turned_rows": True},
    {"turned_rows": True, "draft_vocab_size": 97, "fc_norm": True},
    {"draft_vocab_size": 1},
    {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "max_position_embeddings": 77},
]


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_variants_survive_and_draft_as_before(
    tmp_path: Path, target: Target, flags: dict[str, Any]
) -> None:
    """The loaded head computes what the head in memory computes, rotation included."""
    head = tiny_head(target, **flags)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert_same(loaded, head)
    features = torch.randn(5, head.fc.in_features)
    embeds, positions = torch.randn(5, 32), torch.arange(5)

    def first_key(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Any function will do, as long as it depends on the rotated queries and keys."""
        return query * keys.sum() + values.sum()

    outputs = [
        one.logits(one(embeds, one.fuse(features), positions, first_key).normed_TD)
        for one in (fit_to_target(head, target), fit_to_target(loaded, target))
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stored_type_is_kept(tmp_path: Path, target: Target, dtype: torch.dtype) -> None:
    head = tiny_head(target).to(dtype)
    save_head(head, tmp_path / "head")
    assert_same(load_head(tmp_path / "head"), head)


def test_saving_a_loaded_head_writes_the_same_bytes(tmp_path: Path, files: Files) -> None:
    save_head(load_head(files.directory), tmp_path / "again")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (files.directory / name).read_bytes()


def test_a_heads_own_embedding_survives(tmp_path: Path, target: Target) -> None:
    head = tiny_head(target)
    head.own_embedding = torch.randn(97, 32)
    save_head(head, tmp_path / "head")
    assert_same(load_head(tmp_path / "head"), head)


def test_files_have_the_public_names_and_shapes(files: Files) -> None:
    """eagle3.md 2.1: what vLLM and SGLang look for."""
    shapes = {name: list(tensor.shape) for name, tensor in files.tensors.items()}
    assert shapes == {
        "fc.weight": [32, 96],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [64, 32],
        "d2t": [64],
        "t2d": [97],
    }
    assert files.tensors["d2t"].dtype == torch.int64
    assert files.tensors["t2d"].dtype == torch.bool
    expected = torch.arange(64) + files.tensors["d2t"]
    assert torch.equal(files.tensors["t2d"].nonzero()[:, 0], expected)
    assert IDS not in files.config, "default layers: no ids at all, so that all engines agree"
    assert files.config["norm_before_residual"] is False


@pytest.mark.parametrize(
    "rule",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: name if name in ("d2t", "t2d") else "model." + name,
        lambda name: "model." + name.replace("midlayer.", "layers.0."),
    ],
    ids=["layers.0.", "model.midlayer.", "model.layers.0."],
)
def test_layouts_of_other_projects(
    files: Files, head: Eagle3Head, rule: Callable[[str], str]
) -> None:
    files.rename(rule)
    assert_same(files.load(), head)


def test_a_pickled_checkpoint(files: Files, head: Eagle3Head) -> None:
    files.write_pickle(files.tensors)
    assert_same(load_head(files.directory), head)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_checkpoint_in_several_files(files: Files, head: Eagle3Head, is_pickled: bool) -> None:
    files.split(is_pickled=is_pickled)
    assert_same(load_head(files.directory), head)


def test_logits_made_with_the_heads_own_embedding(files: Files) -> None:
    """Tied: the rows of the draft vocabulary are the `lm_head`."""
    embedding = torch.randn(97, 32)
    del files.tensors["lm_head.weight"]
    files.tensors["embed_tokens.weight"] = embedding
    files.config["tie_word_embeddings"] = True
    loaded = files.load()
    assert torch.equal(loaded.lm_head.weight, embedding[loaded.draft_to_target_V])


def test_norms_of_the_taps_by_their_older_names(tmp_path: Path, target: Target) -> None:
    head = tiny_head(target, fc_norm=True)
    files = Files(tmp_path / "head", head)
    older = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    files.rename(lambda name: older.get(name.removesuffix(".weight"), name[:-7]) + name[-7:])
    del files.config["fc_norm"]
    files.config["use_aux_norm"] = True
    assert_same(files.load(), head)


def test_stored_rotation_frequencies_are_compared(files: Files, head: Eagle3Head) -> None:
    """Old pickles hold them; they say the same as the config or the head is refused."""
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    ours = head.midlayer.self_attn.frequencies(torch.device("cpu"))
    files.tensors[name] = ours.clone()
    assert_same(files.load(), head)
    files.tensors[name] = ours * 2
    with pytest.raises(MismatchError, match=r"inv_freq in .* implies .rope_theta 10000.0"):
        files.load()


@pytest.mark.parametrize("missing", [("t2d",), ("t2d", "d2t")])
def test_vocabulary_tables_may_be_left_out(
    tmp_path: Path, target: Target, missing: tuple[str, ...]
) -> None:
    """Model-Optimizer writes no t2d, and no d2t when the vocabulary is the target's."""
    head = tiny_head(target, draft_vocab_size=97)
    files = Files(tmp_path / "head", head)
    for name in missing:
        del files.tensors[name]
    assert_same(files.load(), head)


def test_an_existing_directory_is_not_overwritten(files: Files, head: Eagle3Head) -> None:
    before = {path.name: path.read_bytes() for path in files.directory.iterdir()}
    with pytest.raises(ArtifactError, match="exists already; choose another place"):
        save_head(head, files.directory)
    assert {path.name: path.read_bytes() for path in files.directory.iterdir()} == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("fledge.models.head_files.save_file", fail)
    with pytest.raises(type(error)):
        save_head(head, tmp_path / "deep" / "head")
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_directory_that_appears_during_a_save_is_not_replaced(
    tmp_path: Path, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "head"

    def interfere(*args: Any, **kwargs: Any) -> None:
        save_file(*args, **kwargs)
        directory.mkdir()
        (directory / "precious").touch()

    monkeypatch.setattr("fledge.models.head_files.save_file", interfere)
    with pytest.raises(ArtifactError, match="exists already; choose another place"):
        save_head(head, directory)
    assert [path.name for path in tmp_path.rglob("*")] == ["head", "precious"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 120}, "vocab_size 97; this target has 120"),
        (
            {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5},
            "target_hidden_size 32; this target has 40",
        ),
    ],
)
def test_a_head_of_another_target(
    head: Eagle3Head, overrides: dict[str, Any], message: str
) -> None:
    other = target_of(tiny_model("llama", **overrides))
    with pytest.raises(MismatchError, match=message):
        Engine(other, head)


@pytest.mark.parametrize("taps", [(1, 2, 5), (-1, 2, 3)])
def test_taps_outside_the_target(target: Target, taps: tuple[int, ...]) -> None:
    with pytest.raises(FledgeError) as caught:
        Engine(target, tiny_head(target, taps=taps))
    assert str(list(taps)) in str(caught.value)
    assert "4 layers" in str(caught.value)


def test_embeddings_of_another_width(target: Target) -> None:
    wide = HeadConfig(
        hidden_size=64,
        target_hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        draft_vocab_size=97,
    )
    with pytest.raises(MismatchError, match=r"shape \[97, 64\]; the target brings \[97, 32\]"):
        fit_to_target(Eagle3Head(wide), target)
    head = Eagle3Head(wide, own_embedding=torch.zeros(90, 64))
    with pytest.raises(MismatchError, match=r"\[97, 64\]; its checkpoint brings \[90, 64\]"):
        fit_to_target(head, target)


def test_a_loaded_head_takes_the_targets_type_and_drafts(files: Files) -> None:
    target = target_of(tiny_model("llama", dtype=torch.float64))
    engine = Engine(target, load_head(files.directory))
    params = SamplingParams(max_tokens=12)
    plain = Engine(target).generate([[5, 6, 7]], params)[0]
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == plain.token_ids


def test_saved_files_are_as_readable_as_each_other(tmp_path: Path) -> None:
    """The writer of the weights makes its file private, which a server under another user meets."""
    save_head(tiny_head(target_of(tiny_model())), tmp_path / "head")
    modes = {path.stat().st_mode for path in (tmp_path / "head").iterdir()}
    assert len(modes) == 1


def test_a_head_that_does_not_fit_beside_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in earnest: `tests/gpu/test_cuda_memory.py`."""
    target = target_of(tiny_model("llama"))
    head = tiny_head(target).double()

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Eagle3Head, "to", fail)
    num_bytes = sum(weight.numel() * 4 for weight in head.parameters())
    with pytest.raises(CapacityError, match="beside the target, and they are not free") as caught:
        fit_to_target(head, target)
    assert f"the head needs {format_bytes(num_bytes)} on cpu" in str(caught.value)
