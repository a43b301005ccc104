"""Heads on disk: what is written is read back bit for bit, and nothing is skipped quietly.

Catches: a flag that is not written (the head would load and draft badly), layer ids read in the
wrong dialect, a tensor that is ignored or left at random, a vocabulary map that points outside the
target or twice at one token, a head of another target, code inside a pickle that is run, and an
error that says "shape mismatch" without saying which two shapes.
"""

import dataclasses
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge import Engine, SamplingParams
from fledge.contracts.errors import ArtifactError, ConfigError, FledgeError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig, default_taps
from fledge.models.head_dialects import config_to_json, json_to_config
from fledge.models.head_files import fit_to_target, load_head, save_head
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model

IDS = "eagle_aux_hidden_state_layer_ids"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FLAGS = ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle3Head:
    return tiny_head(target)


class Files:
    """A saved head whose files can be changed before it is loaded."""

    def __init__(self, directory: Path, head: Eagle3Head) -> None:
        self.directory = directory
        save_head(head, directory)
        self.config: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        self.tensors: dict[str, Tensor] = load_file(directory / WEIGHTS)

    def load(self) -> Eagle3Head:
        (self.directory / CONFIG).write_text(json.dumps(self.config))
        save_file(self.tensors, self.directory / WEIGHTS)
        return load_head(self.directory)

    def rename(self, rule: Callable[[str], str]) -> None:
        self.tensors = {rule(name): tensor for name, tensor in self.tensors.items()}

    def write_pickle(self, content: object) -> Path:
        (self.directory / WEIGHTS).unlink()
        path = self.directory / "pytorch_model.bin"
        torch.save(content, path)
        return path


@pytest.fixture
def files(tmp_path: Path, head: Eagle3Head) -> Files:
    return Files(tmp_path / "head", head)


def assert_same(one: Eagle3Head, other: Eagle3Head) -> None:
    assert one.config == other.config
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name])
    assert torch.equal(one.draft_to_target_V, other.draft_to_target_V)
    assert (one.own_embedding is None) == (other.own_embedding is None)
    if one.own_embedding is not None:
        assert torch.equal(one.own_embedding, other.own_embedding)


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
    {"draft_vocab_size": 97},
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
        for one in (head, loaded)
    ]
    assert torch.equal(*outputs)


def test_rope_scaling_survives_in_the_config(target: Target) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    config = tiny_head(target, rope_scaling={"rope_type": "linear", "factor": 4.0}).config
    for one in (config, dataclasses.replace(config, rope_scaling=scaling)):
        assert json_to_config(config_to_json(one), where="x") == one


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


def speculators_config(plain: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """The same head as speculators would describe it."""
    outer = ("draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    inner = {key: value for key, value in plain.items() if key not in (*outer, "eagle_config")}
    del inner["norm_before_residual"]
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": inner,
        **{key: plain[key] for key in outer},
        **extra,
    }


def test_nested_config_of_speculators(files: Files, head: Eagle3Head) -> None:
    files.rename(lambda name: name.replace("midlayer.", "layers.0."))
    files.config = speculators_config(files.config, norm_before_residual=False)
    assert_same(files.load(), head)


def test_speculators_means_true_when_norm_before_residual_is_absent(files: Files) -> None:
    plain = dict(files.config)
    del plain["norm_before_residual"]
    assert not json_to_config(plain, where="x").norm_before_residual
    assert json_to_config(speculators_config(files.config), where="x").norm_before_residual


@pytest.mark.parametrize(
    ("change", "taps", "num_taps"),
    [
        ({}, None, 3),
        ({IDS: [2, 18, 33]}, (2, 18, 33), 3),
        ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33), 3),
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33), 3),
        ({IDS: [0, 5], "num_aux_hidden_states": 2}, (0, 5), 2),
        ({"eagle_config": {IDS: [0, 8, 16, 24, 32]}}, (1, 9, 17, 25, 33), 5),
        ({"eagle_config": None}, None, 3),
    ],
)
def test_layer_ids_in_every_dialect(
    files: Files, change: dict[str, Any], taps: tuple[int, ...] | None, num_taps: int
) -> None:
    files.config.pop("num_aux_hidden_states")
    config = json_to_config(files.config | {"eagle_config": {}} | change, where="x")
    assert (config.taps, config.num_taps) == (taps, num_taps)


def test_both_dialects_are_written(target: Target) -> None:
    data = config_to_json(tiny_head(target, taps=(1, 2, 4)).config)
    assert data[IDS] == [1, 2, 4]
    assert data["eagle_config"][IDS] == [0, 1, 3]
    assert data["num_aux_hidden_states"] == 3
    data = config_to_json(tiny_head(target, taps=(0, 2, 4)).config)
    assert data[IDS] == [0, 2, 4]
    assert IDS not in data["eagle_config"], "the embedding is the output of no layer"


def test_contradicting_layer_ids_name_both(files: Files) -> None:
    files.config |= {IDS: [2, 18, 33], "eagle_config": {IDS: [2, 18, 33]}}
    with pytest.raises(MismatchError, match=r"two sets of tapped layers") as caught:
        files.load()
    assert str(caught.value).count("[2, 18, 33]") == 2
    assert CONFIG in str(caught.value)


def test_a_bare_sliding_window_is_a_leftover(files: Files) -> None:
    assert json_to_config(files.config | {"sliding_window": 9}, where="x").sliding_window is None
    slides = files.config | {"sliding_window": 9, "layer_types": ["sliding_attention"]}
    assert json_to_config(slides, where="x").sliding_window == 9


@pytest.mark.parametrize(
    ("change", "theta", "scaling"),
    [
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None),
        ({"rope_parameters": None, "rope_theta": 8.0}, 8.0, None),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            10000.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rope_in_both_schemas(
    files: Files, change: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    config = json_to_config(files.config | change, where="x")
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"]
)
@pytest.mark.parametrize("value", [None, 0, -3, "32", 1.5, True])
def test_sizes_must_be_positive_whole_numbers(files: Files, key: str, value: object) -> None:
    files.config[key] = value
    with pytest.raises(ArtifactError) as caught:
        files.load()
    assert f"{key} is {value!r}; a positive whole number is needed" in str(caught.value)
    assert str(files.directory / CONFIG) in str(caught.value)


def test_configs_that_contradict_themselves(files: Files) -> None:
    config = json_to_config(files.config, where="x")
    fields = {name: getattr(config, name) for name in HeadConfig.__slots__}
    with pytest.raises(ConfigError, match=r"names 2 tapped layers \[1, 2\] but is built for 3"):
        HeadConfig(**fields | {"taps": (1, 2)})
    with pytest.raises(ConfigError, match="has 4 attention heads, which 3 key-value heads do not"):
        HeadConfig(**fields | {"num_kv_heads": 3})
    with pytest.raises(ConfigError, match="has 98 tokens, more than the target's 97"):
        HeadConfig(**fields | {"draft_vocab_size": 98})


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [(36, (2, 18, 33)), (30, (2, 15, 27)), (7, (2, 3, 4)), (4, (2, 2, 1)), (1, (1, 0, 0))],
)
def test_default_taps(num_layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(num_layers) == taps


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


def test_a_pickle_of_something_else(files: Files) -> None:
    files.write_pickle([1, 2])
    with pytest.raises(ArtifactError, match="does not hold plain weights"):
        load_head(files.directory)


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


def test_missing_parts(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there is no head directory .*nowhere"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"there is no head directory .*config\.json"):
        load_head(files.directory / CONFIG)
    (files.directory / WEIGHTS).unlink()
    with pytest.raises(ArtifactError, match="neither model.safetensors nor pytorch_model.bin"):
        load_head(files.directory)
    (files.directory / CONFIG).unlink()
    with pytest.raises(ArtifactError, match="has no config.json; it is not a head directory"):
        load_head(files.directory)


def test_an_existing_directory_is_not_overwritten(files: Files, head: Eagle3Head) -> None:
    before = {path.name: path.read_bytes() for path in files.directory.iterdir()}
    with pytest.raises(ArtifactError, match="exists already; choose another place"):
        save_head(head, files.directory)
    assert {path.name: path.read_bytes() for path in files.directory.iterdir()} == before


def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fledge.models.head_files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_head(head, tmp_path / "deep" / "head")
    assert list((tmp_path / "deep").iterdir()) == []


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
