"""Our own layers against transformers' modules over the same weights.

Catches: weights that are there twice, a twin that stops working, families that do not say that they
have no layers of ours, a path that cannot be chosen.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from fledge import Engine
from fledge.contracts.errors import CapacityError, ConfigError, MismatchError
from fledge.contracts.progress import SilentProgress
from fledge.models import fast_layers, target_path
from fledge.models.fast_families import FAMILIES
from fledge.models.target import Target, TargetOutput
from fledge.models.target_path import choose_target_path
from fledge.ops.documents import make_documents
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.packed import SequencePart, pack
from fledge.testing import ARCHITECTURES, target_of, tiny_model, tiny_tokenizer

FAST = sorted(name for name, one in ARCHITECTURES.items() if one["model_type"] in FAMILIES)
CPU = torch.device("cpu")


def passed(
    target: Target,
    path: target_path.TargetPath,
    taps: tuple[int, ...] = (0, 2, 4),
    num_tokens: int = 20,
) -> TargetOutput:
    """One prompt in two passes, the second over what the first has stored."""
    numbers, pool = torch.arange(num_tokens), KVPool(num_tokens)
    ids, last = (numbers + 3) * 7 % 97, numbers[-3:]
    first = numbers[:-3]
    with choose_target_path(path):
        target.forward(pack([SequencePart(ids[:-3], first, first, first)]), pool)
        rest = pack([SequencePart(ids[-3:], last, numbers, numbers)])
        return target.forward(rest, pool, logit_rows_R=torch.tensor([2, 0]), taps=taps)


def test_which_families_are_fast() -> None:
    assert {ARCHITECTURES[name]["model_type"] for name in FAST} == set(FAMILIES)


@pytest.mark.parametrize("architecture", FAST)
def test_both_paths_say_the_same(architecture: str) -> None:
    target = target_of(tiny_model(architecture))
    plain, fast = passed(target, "plain"), passed(target, "fast")
    torch.testing.assert_close(fast.logits_RV, plain.logits_RV, rtol=1e-4, atol=1e-4)
    assert fast.features_TF is not None
    assert plain.features_TF is not None
    torch.testing.assert_close(fast.features_TF, plain.features_TF, rtol=1e-4, atol=1e-4)
    # The modules of transformers now hold views of joined matrices, and compute what they did.
    again = passed(target, "plain")
    torch.testing.assert_close(again.logits_RV, plain.logits_RV, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.parametrize("architecture", ["olmo3-hybrid", "qwen3-moe"])
def test_by_kernels_a_pass_says_the_same(architecture: str) -> None:
    """In Triton's interpreter; tests/lossless takes the engine through two other families."""
    pytest.importorskip("triton")
    layers = {"num_hidden_layers": 2}
    if "hybrid" in architecture:
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    target = target_of(tiny_model(architecture, **layers))
    with choose_kernels("triton"):
        fused = passed(target, "fast", (1,), 5).logits_RV
    plain = passed(target, "plain", (1,), 5).logits_RV
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3-hybrid", "olmo3-hybrid"])
def test_in_half_precision_both_paths_are_near(architecture: str) -> None:
    target = target_of(tiny_model(architecture, dtype=torch.bfloat16))
    plain, fast = passed(target, "plain").logits_RV.float(), passed(target, "fast").logits_RV
    assert (fast.float() - plain).norm() < 3e-2 * plain.norm()


def test_matrices_that_there_is_no_room_to_join_are_told_in_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(parts: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "cat", fail)
    modules = [nn.Linear(8, 4, bias=False), nn.Linear(8, 12, bias=False)]
    with pytest.raises(CapacityError, match="end to end, which takes 512 bytes more") as caught:
        fast_layers.join(modules, is_packed=False)
    assert str(caught.value).startswith("cpu ran out of memory for matrices")


def test_joined_weights_are_there_once() -> None:
    model = tiny_model("qwen2")
    target, other = target_of(model), target_of(model)
    attention, mlp = target.layers[0].self_attn, target.layers[0].mlp
    passed(target, "fast")
    for parts in (
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias],
        [mlp.gate_proj.weight, mlp.up_proj.weight],
    ):
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    # Another target over the same model joins anew, or shares what is joined; both are right.
    torch.testing.assert_close(
        passed(other, "fast").logits_RV, passed(target, "fast").logits_RV, rtol=1e-5, atol=1e-5
    )


def test_documents_longer_than_the_context_are_rotated_on() -> None:
    target = target_of(tiny_model("llama", max_position_embeddings=8))
    ids, documents = torch.arange(3, 23), make_documents([20], CPU)
    with choose_target_path("plain"):
        plain = target.read(ids, documents).final_TD
    torch.testing.assert_close(target.read(ids, documents).final_TD, plain, rtol=1e-4, atol=1e-4)


def test_other_families_fall_back_and_say_so() -> None:
    target = target_of(tiny_model("gpt-oss-hybrid-moe"))
    passed(target, "auto")
    assert target.why_plain == "fledge has no layers of its own for 'gpt_oss'"
    with pytest.raises(MismatchError, match="FLEDGE_TARGET_PATH is 'fast', but fledge has no"):
        passed(target, "fast")


def test_another_activation_falls_back() -> None:
    target = target_of(tiny_model("llama", hidden_act="relu"))
    passed(target, "auto")
    assert target.why_plain == "its activation is relu"


def test_files_that_our_layers_do_not_fit_fall_back(tmp_path: Path) -> None:
    """A family may come to compute something else than it did when our layers were written."""
    target = target_of(tiny_model("llama"))
    target.directory = tmp_path
    target.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    passed(target, "auto")
    assert target.why_plain is not None
    assert "compute something else than transformers' do (relative difference" in target.why_plain


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(("architecture", "is_fast"), [("llama", True), ("deepseek-v3-moe", False)])
def test_loading_says_which_targets_are_slow(
    architecture: str, is_fast: bool, tmp_path: Path
) -> None:
    tiny_model(architecture, vocab_size=300).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    notes = Notes()
    Engine.load(str(tmp_path), dtype="float32", device="cpu", progress=notes)
    said = [note for note in notes.said if "runs on transformers' layers: " in note]
    assert len(said) == (0 if is_fast else 1)


def test_the_path_is_said() -> None:
    target = target_of(tiny_model("llama"))
    assert target.why_plain is None
    with choose_target_path("plain"):
        assert target.why_plain == "FLEDGE_TARGET_PATH is 'plain'"


def test_a_path_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_TARGET_PATH", "quick")
    target_path._path_of_environment.cache_clear()
    try:
        with pytest.raises(ConfigError, match="FLEDGE_TARGET_PATH is 'quick', but must be one of"):
            target_path.target_path()
    finally:
        target_path._path_of_environment.cache_clear()
