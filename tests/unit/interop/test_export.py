"""Exports: the same head in every format, what an engine would misread, and nothing damaged.

Catches: layer ids one off (no engine says so, and hardly a draft is accepted), flags an engine does
not know, draft-token counts with or without the root, and an export over something else.
"""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fledge.contracts.dialects import Dialect
from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, MismatchError
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.export import export_head
from fledge.models.head_files import load_head, save_head
from fledge.testing import tiny_head
from tests.unit.interop.head_cases import DEFAULT_TAPS, IDS, TARGET, write_head, write_target
from tests.unit.models.head_on_disk import assert_same

READABLE: tuple[Dialect, ...] = ("vllm", "sglang", "speculators", "eagle")
"""Formats that `import` reads too."""

VARIANTS: list[tuple[dict[str, Any], tuple[Dialect, ...]]] = [
    ({}, READABLE),
    ({"taps": (1, 3, 6)}, ("vllm", "sglang", "speculators")),
    ({"taps": (1, 2, 4, 6, 7), "num_taps": 5}, ("vllm", "sglang", "speculators")),
    ({"taps": (0, 3, 8)}, ("vllm", "speculators")),
    ({"norm_before_residual": True}, ("vllm", "speculators")),
    ({"norm_before_fc": True}, ("vllm", "sglang", "speculators")),
    ({"fc_norm": True, "norm_output": True}, ("vllm", "sglang", "speculators")),
    ({"qk_norm": True}, ("vllm", "speculators")),
    ({"qk_norm": True, "sliding_window": 4}, ("vllm", "speculators")),
    ({"sliding_window": 4}, ("vllm", "speculators")),
    ({"attention_bias": True, "output_bias": True}, ("vllm", "speculators")),
    ({"num_heads": 8, "num_kv_heads": 4}, ("vllm", "sglang", "speculators")),
    ({"draft_vocab_size": 97}, READABLE),
    ({"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 77}, READABLE),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ("vllm", "sglang", "speculators"),
    ),
]
CASES = [(flags, to) for flags, formats in VARIANTS for to in formats]


@pytest.mark.parametrize(("flags", "to"), CASES, ids=str)
def test_every_format_holds_the_same_head(
    tmp_path: Path, flags: dict[str, Any], to: Dialect
) -> None:
    head = write_head(tmp_path / "head", **flags)
    report = export_head(head, tmp_path / "out", to, verify=True)
    assert_same(load_head(report.directory), load_head(head))
    assert len(report.checks) == 3
    assert set(report.files) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("to", READABLE)
def test_the_stored_type_is_kept(tmp_path: Path, to: Dialect) -> None:
    save_head(tiny_head(TARGET).to(torch.bfloat16), tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to, verify=True)
    assert_same(load_head(tmp_path / "out"), load_head(tmp_path / "head"))


def config_of(directory: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize(
    ("to", "top", "eagle"),
    [("vllm", [1, 3, 6], [0, 2, 5]), ("sglang", [1, 3, 6], [0, 2, 5])],
)
def test_layer_ids_in_both_countings(
    tmp_path: Path, to: Dialect, top: list[int], eagle: list[int]
) -> None:
    head = write_head(tmp_path / "head", taps=(1, 3, 6))
    data = config_of(export_head(head, tmp_path / "out", to).directory)
    assert (data[IDS], data["eagle_config"][IDS]) == (top, eagle)
    assert data["num_aux_hidden_states"] == 3


@pytest.mark.parametrize("to", READABLE)
@pytest.mark.parametrize("taps", [None, DEFAULT_TAPS])
def test_default_layers_are_not_named(
    tmp_path: Path, to: Dialect, taps: tuple[int, ...] | None
) -> None:
    """With no ids at all every engine takes the same ones."""
    head = tiny_head(TARGET, taps=taps)
    save_head(head, tmp_path / "head")
    target = write_target(tmp_path / "target")
    patch_vocabulary(target)
    report = export_head(tmp_path / "head", tmp_path / "out", to, target=str(target), verify=True)
    data = config_of(report.directory)
    assert data.get(IDS) is None
    assert IDS not in data.get("eagle_config", {})
    assert report.checks[0] == "target layers read: 2, 4, 5"


def patch_vocabulary(target: Path, **changes: Any) -> None:
    """Exports read only the numbers of a target's config."""
    data = config_of(target) | {"vocab_size": 97} | changes
    (target / "config.json").write_text(json.dumps(data))


def bare_target(directory: Path, model_type: str, **changes: Any) -> str:
    """A target's config alone."""
    directory.mkdir()
    sizes = {"num_hidden_layers": 8, "hidden_size": 32, "vocab_size": 97}
    data = {"model_type": model_type, "architectures": ["X"], **sizes, **changes}
    (directory / "config.json").write_text(json.dumps(data))
    return str(directory)


@pytest.mark.parametrize(
    ("model_type", "taps", "ids"),
    [
        ("llama", (1, 3, 6), [0, 2, 5]),
        ("deepseek_v2", (2, 3, 6), [1, 2, 5]),
        ("deepseek_v3", (3, 4, 6), [3, 4, 6]),
        ("glm_moe_dsa", (3, 4, 6), [3, 4, 6]),
        ("glm4_moe_lite", (1, 3, 6), None),
        ("gpt_oss", (2, 4, 8), [1, 3, 7]),
        ("gpt_oss", (2, 4, 7), [1, 3, 6]),
        ("minimax_m3_vl", None, [1, 3, 4]),
    ],
)
def test_targets_on_which_sglang_counts_otherwise(
    tmp_path: Path, model_type: str, taps: tuple[int, ...] | None, ids: list[int] | None
) -> None:
    """glm4_moe_lite with ids beginning at 1 would add 1, and otherwise reads them as they are."""
    head = write_head(tmp_path / "head", taps=taps)
    target = bare_target(tmp_path / "target", model_type)
    out = tmp_path / "out"
    if ids is None:
        with pytest.raises(MismatchError, match=r"cannot be told to hand over .*\[1, 3, 6\]"):
            export_head(head, out, "sglang", target=target)
        assert not out.exists()
        return
    export_head(head, out, "sglang", target=target, verify=True)
    assert config_of(out)["eagle_config"][IDS] == ids


REFUSED: list[tuple[Dialect, dict[str, Any], str]] = [
    ("sglang", {"norm_before_residual": True}, "norm_before_residual .* Export it for vLLM"),
    ("sglang", {"qk_norm": True}, "queries and keys are normed .* Export it for vLLM"),
    ("sglang", {"attention_bias": True}, "its attention has biases.* Export it for vLLM"),
    ("sglang", {"taps": (0, 3, 6)}, r"after \[0, 3, 6\] .* 1 to n-1 only.* export it for vLLM"),
    ("sglang", {"taps": (4,), "num_taps": 1}, r"1 target states of 32 .* leaves fc out"),
    ("vllm", {"taps": (3, 1, 6)}, r"\[3, 1, 6\] completed layers, in that order; vLLM"),
    ("sglang", {"taps": (3, 3, 6)}, r"in ascending order and each once"),
    ("speculators", {"taps": (3, 1, 6)}, r"in that order; vLLM"),
    ("speculators", {"fc_norm": True, "norm_before_fc": True}, "both set.* Export it for vLLM"),
    ("speculators", {"attention_bias": True}, "one behind attention too. Export it for vLLM"),
    ("eagle", {"taps": (1, 3, 6)}, r"cannot be told otherwise; this head reads \[1, 3, 6\]"),
    ("eagle", {"norm_before_residual": True}, "norm_before_residual is true"),
    ("eagle", {"norm_output": True}, "norms of EAGLE-3.1"),
    ("eagle", {"norm_before_fc": True}, "norm_before_fc is true.* as GGUF, or train"),
    ("eagle", {"sliding_window": 9}, "sliding window of 9"),
    ("eagle", {"num_taps": 2, "taps": (1, 2)}, "reads 2 target layers"),
    ("eagle", {"num_heads": 2}, "2 heads of 8 make 16, not the hidden size 32"),
    ("eagle", {"num_heads": 8}, "8 heads of 8 make 64, not the hidden size 32"),
    ("eagle", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "its rotation is scaled"),
]


@pytest.mark.parametrize(("to", "flags", "message"), REFUSED, ids=str)
def test_what_an_engine_would_misread_is_refused(
    tmp_path: Path, to: Dialect, flags: dict[str, Any], message: str
) -> None:
    head = write_head(tmp_path / "head", **flags)
    with pytest.raises(MismatchError, match=message):
        export_head(head, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_an_embedding_that_sglang_would_replace_is_refused(tmp_path: Path) -> None:
    head = tiny_head(TARGET)
    head.own_embedding = torch.randn(97, 32)
    save_head(head, tmp_path / "head")
    with pytest.raises(MismatchError, match="own embedding, and SGLang puts the target's in its"):
        export_head(tmp_path / "head", tmp_path / "out", "sglang")
    export_head(tmp_path / "head", tmp_path / "out", "vllm", verify=True)
    assert_same(load_head(tmp_path / "out"), head)


def test_vllm_makes_room_for_a_bias_that_is_not_there(tmp_path: Path) -> None:
    """Left out, it would be whatever the memory held."""
    head = write_head(tmp_path / "head", attention_bias=True)
    export_head(head, tmp_path / "out", "vllm", verify=True)
    assert not load_head(tmp_path / "out").midlayer.self_attn.o_proj.bias.any()


TUNED = TunedSettings(tree=TreeSettings(depth=6, width=8, budget=40), chain_depth=4)


@pytest.mark.parametrize(
    ("to", "tuned", "words"),
    [
        ("vllm", TUNED, ['"num_speculative_tokens": 4']),
        ("vllm", TunedSettings(tree=TreeSettings(depth=5)), ['"num_speculative_tokens": 5']),
        ("speculators", TUNED, ['"num_speculative_tokens": 4']),
        ("sglang", TUNED, ["-num-steps 6", "-eagle-topk 8", "-num-draft-tokens 41"]),
        (
            "sglang",
            TunedSettings(tree=TreeSettings(depth=5, width=1, budget=40)),
            ["-num-steps 5", "-eagle-topk 1", "-num-draft-tokens 6"],
        ),
        ("sglang", None, ["-num-steps 3", "-eagle-topk 1", "-num-draft-tokens 4"]),
        ("eagle", TUNED, ["--total-token 41"]),
    ],
    ids=str,
)
def test_settings_in_the_engines_own_counting(
    tmp_path: Path, to: Dialect, tuned: TunedSettings | None, words: list[str]
) -> None:
    head = write_head(tmp_path / "head")
    report = export_head(head, tmp_path / "out", to, tuned=tuned)
    text = (tmp_path / "out" / "README.md").read_text()
    for word in words:
        assert word in report.serve_command
    assert report.serve_command in text
    assert str(tmp_path / "out") in report.serve_command
    assert report.notes
    assert all(note in text for note in report.notes)


def test_the_window_of_a_head_is_an_option_in_sglang(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", sliding_window=4)
    report = export_head(head, tmp_path / "out", "sglang", verify=True)
    assert "--speculative-draft-window-size 3" in report.serve_command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 98}, "vocab_size 97; .*target has 98. Give the target it was trained"),
        ({"hidden_size": 64}, "hidden_size 32; .*target has 64"),
        ({"num_hidden_layers": 5}, r"after \[1, 3, 6\] completed layers; .* has 5"),
    ],
)
def test_a_head_of_another_target(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    head = write_head(tmp_path / "head", taps=(1, 3, 6))
    target = bare_target(tmp_path / "target", "llama", **changes)
    with pytest.raises(MismatchError, match=message):
        export_head(head, tmp_path / "out", "vllm", target=target)


def test_a_target_without_sizes(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    target = bare_target(tmp_path / "target", "llama", vocab_size=None)
    with pytest.raises(ArtifactError, match="does not describe a decoder-only language model"):
        export_head(head, tmp_path / "out", "vllm", target=target)
    (tmp_path / "target" / "config.json").unlink()
    with pytest.raises(ArtifactError, match="has no readable config.json"):
        export_head(head, tmp_path / "out", "vllm", target=target)


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    place = tmp_path / "out"
    place.mkdir()
    (place / "precious.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="exists already"):
        export_head(head, place, "vllm")
    assert [path.name for path in place.iterdir()] == ["precious.txt"]
    with pytest.raises(ArtifactError, match="exists already"):
        export_head(head, head, "vllm")
    load_head(head)


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (OSError(28, "No space left"), CapacityError, "run the same command again; nothing was"),
        (KeyboardInterrupt("by the user"), KeyboardInterrupt, "by the user"),
    ],
)
def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    seen: type[BaseException],
    message: str,
) -> None:
    head = write_head(tmp_path / "heads" / "head")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("fledge.interop.checkpoint_files.save_file", fail)
    with pytest.raises(seen, match=message):
        export_head(head, tmp_path / "outs" / "out", "vllm")
    assert list((tmp_path / "outs").iterdir()) == []
    load_head(head)


def test_unknown_formats_name_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'onnx'; it must be one of vllm, sglang, speculators"):
        export_head(write_head(tmp_path / "h"), tmp_path / "out", cast(Dialect, "onnx"))
