"""GGUF: what llama.cpp reads of a head and of its target, read back value by value.

Catches: queries and keys in the wrong order of rows (drafts would be noise), `d2t` as offsets,
layer numbers of another counting, and a vocabulary that cuts text otherwise.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fledge.contracts.dialects import HeadPrecision
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.interop.export import export_head
from fledge.interop.gguf_rounding import round_to_blocks
from fledge.models.gguf_vocabulary import read_vocabulary
from fledge.models.head_files import save_head
from fledge.models.resolve import resolve_target
from fledge.testing import target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.unit.interop.head_cases import write_target
from tests.unit.tiny_gguf import write_tiny_gguf

VOCAB = len(tiny_tokenizer())
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BLOCK_NAMES = (
    *("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
MODEL = target_of(tiny_model("llama", num_hidden_layers=8, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("gguf") / "target")


def saved(directory: Path, dtype: torch.dtype = torch.float32, **flags: Any) -> Path:
    save_head(tiny_head(MODEL, **flags).to(dtype), directory)
    return directory


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"taps": (6, 0, 7)},
        {"num_heads": 8, "num_kv_heads": 4},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "draft_vocab_size": VOCAB},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3, "head_dim": 16},
    ],
    ids=str,
)
def test_a_head_is_read_back_by_llamacpps_rules(
    tmp_path: Path, target: Path, flags: dict[str, Any]
) -> None:
    head = saved(tmp_path / "head", **flags)
    report = export_head(head, tmp_path / "out", "gguf", target=str(target), verify=True)
    assert set(report.files) == {"README.md", "head.gguf", "target.gguf"}
    assert len(report.checks) == 3
    assert f"--model {tmp_path}/out/target.gguf" in report.serve_command
    assert "--spec-draft-n-max 3" in report.serve_command


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_stored_type_is_kept(tmp_path: Path, target: Path, dtype: torch.dtype) -> None:
    head = saved(tmp_path / "head", dtype)
    export_head(head, tmp_path / "out", "gguf", target=str(target), verify=True)
    kinds = {one.tensor_type.name for one in GGUFReader(tmp_path / "out" / "head.gguf").tensors}
    assert kinds == {"BF16" if dtype is torch.bfloat16 else "F16", "F32", "I64"}


def test_names_and_values_of_a_heads_file(tmp_path: Path, target: Path) -> None:
    head = saved(tmp_path / "head", taps=(1, 4, 7))
    export_head(head, tmp_path / "out", "gguf", target=str(target))
    reader = GGUFReader(tmp_path / "out" / "head.gguf")
    assert {one.name for one in reader.tensors} == {
        "fc.weight",
        "output_norm.weight",
        "output.weight",
        "d2t",
        *(f"blk.0.{name}.weight" for name in BLOCK_NAMES),
    }
    fields = {key: reader.get_field(key) for key in ("eagle3.target_layers", "eagle3.block_count")}
    values = [field.contents() for field in fields.values() if field is not None]
    assert values == [[1, 4, 7], 1]
    ids = next(one.data for one in reader.tensors if one.name == "d2t")
    assert torch.equal(torch.from_numpy(ids.copy()), tiny_head(MODEL).draft_to_target_V)


def test_a_targets_file_is_the_target(tmp_path: Path, target: Path) -> None:
    """Our own reader of GGUF files, which others' files have been checked with, gives it back."""
    export_head(saved(tmp_path / "head"), tmp_path / "out", "gguf", target=str(target))
    place = resolve_target(str(tmp_path / "out" / "target.gguf"), cache_dir=tmp_path / "cache")
    models = [AutoModelForCausalLM.from_pretrained(one) for one in (target, place.directory)]
    with torch.no_grad():
        logits = [model(torch.arange(12)[None]).logits for model in models]
    torch.testing.assert_close(*logits)
    text = "Hello, it's 12 tests!\n"
    ids = [AutoTokenizer.from_pretrained(one).encode(text) for one in (target, place.directory)]
    assert ids[0] == ids[1]


def test_a_qwen3_target_keeps_its_rows_and_its_norms(tmp_path: Path) -> None:
    """llama.cpp rotates Qwen3's queries and keys by halves, as everybody does."""
    source = write_target(tmp_path / "target", "qwen3")
    export_head(saved(tmp_path / "head"), tmp_path / "out", "gguf", target=str(source))
    stored = {one.name: one.data for one in GGUFReader(tmp_path / "out" / "target.gguf").tensors}
    weights = load_file(source / "model.safetensors")
    for name, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("q_norm", "attn_q_norm")):
        ours = weights[f"model.layers.3.self_attn.{name}.weight"]
        assert torch.equal(torch.from_numpy(stored[f"blk.3.{theirs}.weight"].copy()), ours)


def test_a_target_that_is_a_gguf_file_stays_where_it_is(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    model = write_tiny_gguf(source)
    save_head(tiny_head(target_of(model), taps=(0, 1, 1)), tmp_path / "head")
    report = export_head(tmp_path / "head", tmp_path / "out", "gguf", target=str(source))
    assert "target.gguf" not in report.files
    assert f"--model {source} " in report.serve_command
    fields = [
        reader.get_field(f"tokenizer.{key}").contents()
        for reader in (GGUFReader(source), GGUFReader(tmp_path / "out" / "head.gguf"))
        for key in ("ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.pre", "chat_template")
    ]
    assert fields[:5] == fields[5:]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fc_norm": True}, "norms of EAGLE-3.1 .* llama.cpp has not. Export it for vLLM"),
        ({"qk_norm": True}, "queries and keys are normed"),
        ({"attention_bias": True}, "its attention has biases"),
        ({"sliding_window": 5}, "sliding window of 5"),
        ({"taps": (8, 2, 4)}, "of the last one llama.cpp hands over the normed state"),
        ({"taps": (1, 2), "num_taps": 2}, "reads 2 target layers, and llama.cpp hands over 3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotates by 'dynamic'"),
    ],
    ids=str,
)
def test_what_llamacpp_has_not_is_refused(
    tmp_path: Path, target: Path, flags: dict[str, Any], message: str
) -> None:
    head = saved(tmp_path / "head", **flags)
    with pytest.raises(MismatchError, match=message):
        export_head(head, tmp_path / "out", "gguf", target=str(target))
    assert not (tmp_path / "out").exists()


def test_a_gguf_head_needs_its_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the target with --target"):
        export_head(saved(tmp_path / "head"), tmp_path / "out", "gguf")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("qwen2", "cannot hand over the layers of qwen2 targets; .* vLLM or OpenVINO"),
        ("gpt_oss", "a gpt_oss target is not written as GGUF here .* own converter"),
    ],
)
def test_targets_that_llamacpp_or_we_cannot(
    tmp_path: Path, target: Path, model_type: str, message: str
) -> None:
    other = tmp_path / "target"
    other.mkdir()
    config = json.loads((target / "config.json").read_text()) | {"model_type": model_type}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=message):
        export_head(saved(tmp_path / "head"), tmp_path / "out", "gguf", target=str(other))


def test_a_target_with_a_window_or_other_tensors(tmp_path: Path, target: Path) -> None:
    other, head = tmp_path / "target", saved(tmp_path / "head")
    shutil.copytree(target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    with pytest.raises(MismatchError, match="sliding window of 64, for which .* own converter"):
        export_head(head, tmp_path / "out", "gguf", target=str(other))
    (other / "config.json").write_text(json.dumps(config))
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"model.extra.weight": torch.ones(2)}, other / "model.safetensors")
    with pytest.raises(MismatchError, match="tensor model.extra.weight, for which .* no place"):
        export_head(head, tmp_path / "out", "gguf", target=str(other))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "has no tokenizer.json"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "not byte-level"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "has no name here"),
    ],
)
def test_tokenizers_that_have_no_name(
    tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(MismatchError, match=message):
        read_vocabulary(tmp_path, VOCAB)


def test_a_vocabulary_of_another_size_than_the_targets(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    vocabulary = read_vocabulary(tmp_path, VOCAB + 2)
    assert vocabulary.cut == "gpt-2"
    assert vocabulary.tokens[-1] == f"[PAD{VOCAB + 1}]"
    assert vocabulary.types[-1] == 5
    assert vocabulary.special_ids == {"bos": 1, "eos": 2, "padding": 0}


@pytest.mark.parametrize(("precision", "kind"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_a_head_rounded_to_blocks(
    tmp_path: Path, target: Path, precision: HeadPrecision, kind: str
) -> None:
    """Read back it is the rounded head, to the bit; norms stay as they were."""
    head, out = saved(tmp_path / "head", torch.bfloat16), tmp_path / "out"
    report = export_head(head, out, "gguf", target=str(target), precision=precision, verify=True)
    assert len(report.checks) == 3
    reader = GGUFReader(out / "head.gguf")
    kinds = {one.name: one.tensor_type.name for one in reader.tensors}
    matrices = ("fc", "output", "blk.0.attn_q", "blk.0.attn_output", "blk.0.ffn_gate")
    assert {kinds[f"{name}.weight"] for name in matrices} == {kind}
    assert kinds["blk.0.ffn_down.weight"] == "F32", "48 values are no whole blocks"
    assert {kinds[name] for name in kinds if "norm" in name} == {"F32"}
    assert f"| precision | {precision} |" in (out / "README.md").read_text()
    plain = export_head(head, tmp_path / "plain", "gguf", target=str(target))
    assert (out / "head.gguf").stat().st_size < (plain.directory / "head.gguf").stat().st_size


def test_rounding_is_for_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--precision q8_0 is for GGUF heads"):
        export_head(saved(tmp_path / "head"), tmp_path / "out", "vllm", precision="q8_0")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_values_that_all_but_vanish_are_rounded_to_nothing(kind: GGMLQuantizationType) -> None:
    """Beside others as alone in a block, whose scale could not be inverted."""
    values = torch.zeros(2, 32)
    values[0, :2], values[1, :2] = torch.tensor([1e-40, -3e-39]), torch.tensor([1e-40, 127.0])
    rounded = torch.from_numpy(dequantize(round_to_blocks(values, kind), kind))
    assert rounded.tolist() == [[0.0] * 32, [0.0, 127.0] + [0.0] * 30]
