"""Heads of other projects become ours: every layout, every tensor used, and what is wrong is named.

Catches: a layout that is half read, rows of the wrong matrix as `lm_head`, a head of another
target, and a source directory that is changed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fledge import Engine, SamplingParams
from fledge.contracts.errors import ArtifactError, ConfigError, FetchError, MismatchError
from fledge.interop.import_head import import_head
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.unit.models.head_on_disk import Files, assert_same

VOCAB = len(tiny_tokenizer())
MODEL = target_of(tiny_model("llama", num_hidden_layers=8, vocab_size=VOCAB))
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("import") / "target", num_hidden_layers=8)


def keep(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: config[name] for name in names}


SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "num_hidden_layers", "vocab_size", "draft_vocab_size", "hidden_act"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings"),
)


def as_safeailab(files: Files) -> None:
    """Flat and short, no flags of others."""
    files.config = keep(files.config, *SIZES) | {"architectures": ["LlamaForCausalLM"]}


def as_specforge(files: Files) -> None:
    ids = [1, 3, 5]
    eagle = {IDS: ids, "use_aux_hidden_state": True}
    files.config = keep(files.config, *SIZES) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": eagle,
        "fc_norm": False,
        "norm_output": False,
    }


def as_model_optimizer(files: Files) -> None:
    """`layers.0.`, no t2d, flags of its own, the layers under eagle_config."""
    files.rename(lambda name: name.replace("midlayer.", "layers.0."))
    del files.tensors["t2d"]
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    files.config = keep(files.config, *SIZES) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
        "eagle_config": {
            **flags,
            IDS: [1, 3, 5],
            "use_aux_hidden_state": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
    }


def store_pickled(files: Files) -> None:
    files.write_config()
    files.write_pickle(files.tensors)


def store_sharded(files: Files) -> None:
    files.write()
    files.split()


LAYOUTS: list[tuple[Callable[[Files], None], str, tuple[int, ...] | None]] = [
    (as_safeailab, "SafeAILab", None),
    (as_specforge, "SpecForge", (2, 4, 6)),
    (as_model_optimizer, "Model-Optimizer", (2, 4, 6)),
]


@pytest.mark.parametrize(
    ("change", "layout", "taps"), LAYOUTS, ids=["safeailab", "specforge", "model-optimizer"]
)
@pytest.mark.parametrize(
    "storing", [Files.write, store_pickled, store_sharded], ids=["plain", "pickled", "sharded"]
)
def test_every_layout_becomes_ours(
    tmp_path: Path,
    target: Path,
    change: Callable[[Files], None],
    layout: str,
    taps: tuple[int, ...] | None,
    storing: Callable[[Files], None],
) -> None:
    head = tiny_head(MODEL, taps=taps)
    files = Files(tmp_path / "theirs", head)
    change(files)
    storing(files)
    before = {path.name: path.read_bytes() for path in files.directory.iterdir()}
    report = import_head(files.directory, tmp_path / "ours", target=str(target))
    assert_same(load_head(tmp_path / "ours"), head)
    assert (report.layout, report.taps, report.num_tensors) == (layout, taps, 13)
    assert {path.name: path.read_bytes() for path in files.directory.iterdir()} == before


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_without_lm_head_takes_the_targets_rows(
    tmp_path: Path, target: Path, is_tied: bool
) -> None:
    head = tiny_head(MODEL).to(torch.bfloat16)
    files = Files(tmp_path / "theirs", head)
    del files.tensors["lm_head.weight"]
    files.config["tie_word_embeddings"] = is_tied
    files.write()
    report = import_head(files.directory, tmp_path / "ours", target=str(target))
    weights = load_file(target / "model.safetensors")
    matrix = weights["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    rows = matrix[head.draft_to_target_V].to(torch.bfloat16)
    assert torch.equal(load_head(tmp_path / "ours").lm_head.weight, rows)
    assert f"64 rows of the target's {'embedding' if is_tied else 'lm_head'}" in report.notes[0]


def test_an_embedding_that_is_the_targets_is_shared(tmp_path: Path, target: Path) -> None:
    head = tiny_head(MODEL)
    head.own_embedding = MODEL.embedding.weight.detach().clone()
    files = Files(tmp_path / "theirs", head)
    report = import_head(files.directory, tmp_path / "ours", target=str(target))
    assert load_head(tmp_path / "ours").own_embedding is None
    assert "it is shared instead of stored" in report.notes[0]
    head.own_embedding = head.own_embedding + 1
    files = Files(tmp_path / "other", head)
    import_head(files.directory, tmp_path / "own", target=str(target))
    assert_same(load_head(tmp_path / "own"), head)


def test_an_imported_head_drafts_and_changes_no_answer(tmp_path: Path, target: Path) -> None:
    files = Files(tmp_path / "theirs", tiny_head(MODEL, qk_norm=True, norm_before_residual=True))
    import_head(files.directory, tmp_path / "ours", target=str(target))
    params = SamplingParams(max_tokens=10)
    answers = [
        Engine(MODEL, head).generate([[5, 6, 7]], params)[0].token_ids
        for head in (None, load_head(tmp_path / "ours"))
    ]
    assert answers[0] == answers[1]


def forget_target(files: Files) -> None:
    del files.tensors["lm_head.weight"]


def turn_fc(files: Files) -> None:
    files.tensors["fc.weight"] = files.tensors["fc.weight"].T.contiguous()


def lengthen_ids(files: Files) -> None:
    files.tensors["d2t"][-1] = VOCAB


def add_unknown(files: Files) -> None:
    files.tensors["mask_hidden"] = torch.zeros(4)


def quantise(files: Files) -> None:
    files.tensors["fc.weight"] = files.tensors["fc.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (forget_target, ConfigError, "no lm_head.weight: .* Name the target with --target"),
        (turn_fc, MismatchError, r"fc.weight .* \[96, 32\]; .* \[32, 96\]: it is transposed"),
        (lengthen_ids, MismatchError, "maps to target ids"),
        (add_unknown, MismatchError, r"unknown \['mask_hidden'\]"),
        (quantise, MismatchError, "fc.weight .* is of type int8"),
    ],
)
def test_what_is_wrong_with_a_head_is_named(
    tmp_path: Path, change: Callable[[Files], None], error: type[Exception], message: str
) -> None:
    files = Files(tmp_path / "theirs", tiny_head(MODEL))
    change(files)
    files.write()
    with pytest.raises(error, match=message):
        import_head(files.directory, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return Files(tmp_path / "theirs", tiny_head(MODEL)).directory


def test_a_truncated_file_and_a_missing_shard(tmp_path: Path, plain: Path) -> None:
    path = plain / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match="is damaged or truncated"):
        import_head(plain, tmp_path / "ours")
    path.write_bytes(whole)
    index = plain / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model-1.safetensors"}}))
    path.unlink()
    with pytest.raises(ArtifactError, match="names the file model-1.safetensors, which is missing"):
        import_head(plain, tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, "hidden_size 32; .* has 64"),
        ({"num_hidden_layers": 4}, r"after \[2, 4, 6\] completed layers; .* has 4"),
    ],
)
def test_a_head_of_another_target(
    tmp_path: Path, target: Path, change: dict[str, Any], message: str
) -> None:
    files = Files(tmp_path / "theirs", tiny_head(MODEL, taps=(2, 4, 6)))
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((target / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=message):
        import_head(files.directory, tmp_path / "ours", target=str(other))


def test_a_target_whose_rows_do_not_fit(tmp_path: Path, target: Path) -> None:
    """A head narrower than its target cannot share the target's `lm_head`."""
    config = tiny_head(MODEL).config
    sizes = {name: getattr(config, name) for name in type(config).__slots__}
    head = Eagle3Head(type(config)(**sizes | {"hidden_size": 16}))
    head.draft_to_target_V = torch.arange(config.draft_vocab_size)
    head.own_embedding = torch.zeros(VOCAB, 16)
    files = Files(tmp_path / "theirs", head)
    forget_target(files)
    files.write()
    with pytest.raises(MismatchError, match="rows of 32 values; the head's hidden size is 16"):
        import_head(files.directory, tmp_path / "ours", target=str(target))


@pytest.mark.parametrize(
    ("keeps_weights", "change", "message"),
    [
        (False, {}, "has no lm_head in safetensors files"),
        (
            True,
            {"vocab_size": VOCAB + 1},
            rf"lm_head of .* has {VOCAB} rows, .* {VOCAB + 1} tokens",
        ),
    ],
)
def test_a_target_that_lacks_the_rows(
    tmp_path: Path, target: Path, keeps_weights: bool, change: dict[str, Any], message: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((target / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(config))
    if keeps_weights:
        (other / "model.safetensors").symlink_to(target / "model.safetensors")
    head = tiny_head(target_of(tiny_model("llama", vocab_size=config["vocab_size"])))
    files = Files(tmp_path / "theirs", head)
    forget_target(files)
    files.write()
    with pytest.raises(ArtifactError, match=message):
        import_head(files.directory, tmp_path / "ours", target=str(other))


def test_sources_that_are_none(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArtifactError, match="there is no head directory .*nowhere. Give a dir"):
        import_head(tmp_path / "nowhere", tmp_path / "ours")
    with pytest.raises(ConfigError, match="config.json is a file; give the directory"):
        import_head(plain / "config.json", tmp_path / "ours")
    with pytest.raises(ArtifactError, match="exists already"):
        import_head(plain, plain)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match="nobody/no-head"):
        import_head("nobody/no-head", tmp_path / "ours")
