"""Whole documents end to end: taps, final states and logits equal transformers' own forward.

Catches: documents of a pass that see each other, positions that run on over a border, a window off
by one, a block of queries that loses its oldest keys, taps off by one layer, the last layer tapped
behind the final norm, and a family's treatment of logits left out.
"""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fledge.contracts.errors import CapacityError, MismatchError
from fledge.models.self_check import check_reading
from fledge.models.target import Target
from fledge.models.target_path import choose_target_path
from fledge.ops import document_attention
from fledge.ops.attention import AttentionSpec
from fledge.ops.document_attention import DocumentAttention, attend_documents_plain
from fledge.ops.documents import make_documents
from fledge.testing import ARCHITECTURES, draw_wide, target_of, tiny_model

CPU = torch.device("cpu")
NUM_LAYERS = 4
ALL_TAPS = tuple(range(NUM_LAYERS + 1))
LENGTHS = (23, 1, 9, 40)


@cache
def pair(architecture: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Target]:
    model = tiny_model(architecture, dtype=dtype)
    return model, target_of(model)


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(0))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def by_transformers(model: Any, ids_T: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states and logits of the documents, each read alone by the model's own attention."""
    outputs = []
    for ids_Q in ids_T.split(list(LENGTHS)):
        with torch.no_grad():
            output = model(ids_Q[None], use_cache=False, output_hidden_states=True)
        outputs.append([*(hidden[0] for hidden in output.hidden_states), output.logits[0]])
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def by_reading(target: Target, ids_T: torch.Tensor) -> list[torch.Tensor]:
    """The same from documents end to end; the last layer's tap is put through the final norm."""
    reading = target.read(ids_T, make_documents(LENGTHS, CPU), ALL_TAPS)
    taps = list(reading.features_TF.split(target.hidden_size, dim=1))
    # transformers hands out the last layer only behind the final norm.
    with torch.no_grad():
        taps[-1] = target._model.get_decoder().norm(taps[-1])
    assert torch.equal(taps[-1], reading.final_TD)
    return [*taps, target.readout.logits(reading.final_TD)]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_packed_documents_equal_transformers_one_by_one(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far smaller blocks than documents, so that the borders between blocks are tested too.
    monkeypatch.setattr(document_attention, "_QUERIES_AT_ONCE", 7)
    model, target = pair(architecture)
    ids_T = token_ids(sum(LENGTHS))
    for ours, theirs in zip(by_reading(target, ids_T), by_transformers(model, ids_T), strict=True):
        assert relative(ours, theirs) < 1e-5


# Rounding may send a token to another expert, and then nothing is close any more.
@pytest.mark.parametrize("architecture", sorted(a for a in ARCHITECTURES if "moe" not in a))
def test_in_bfloat16_we_are_as_near_the_truth_as_transformers(architecture: str) -> None:
    exact, _ = pair(architecture)
    model, target = pair(architecture, torch.bfloat16)
    ids_T = token_ids(sum(LENGTHS))
    for ours, theirs, truth in zip(
        by_reading(target, ids_T),
        by_transformers(model, ids_T),
        by_transformers(exact, ids_T),
        strict=True,
    ):
        assert relative(ours, truth) < 1.25 * relative(theirs, truth) + 1e-3


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma2-hybrid"])
def test_a_document_reads_the_same_in_any_company(architecture: str) -> None:
    _, target = pair(architecture)
    ids_T = token_ids(sum(LENGTHS))
    packed = target.read(ids_T, make_documents(LENGTHS, CPU), ALL_TAPS)
    rows = torch.split(torch.arange(len(ids_T)), list(LENGTHS))
    for rows_Q in rows:
        alone = target.read(ids_T[rows_Q], make_documents([len(rows_Q)], CPU), ALL_TAPS)
        assert relative(packed.features_TF[rows_Q], alone.features_TF) < 1e-5
        assert relative(packed.final_TD[rows_Q], alone.final_TD) < 1e-5


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_attention_equals_its_twin(
    window: int | None, soft_cap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_attention, "_QUERIES_AT_ONCE", 5)
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, 2, 2)
    )
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    spec = AttentionSpec(scale=0.5, window=window, soft_cap=soft_cap, sinks_H=sinks)
    documents = make_documents(LENGTHS, CPU)
    ours = DocumentAttention(documents).attend(query, keys, values, spec)
    twin = attend_documents_plain(query, keys, values, documents, spec)
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-5)


def small(model_type: str, **options: Any) -> Any:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_wide(model, seed=0)
    return model.eval()


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8}),
        ("llama", {}),
    ],
)
def test_what_families_do_to_logits(model_type: str, options: dict[str, Any]) -> None:
    model = small(model_type, **options)
    target = target_of(model)
    check_reading(target)
    ids_T = token_ids(11)
    final_TD = target.read(ids_T, make_documents([11], CPU)).final_TD
    some = torch.tensor([5, 96, 0])
    everything = target.readout.logits(final_TD)
    assert relative(everything, target.logits_by_transformers(ids_T)) < 1e-5
    torch.testing.assert_close(target.readout.logits(final_TD, some), everything[:, some])


def test_an_output_bias_counts() -> None:
    model = small("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(97))
    target = Target(target_of(small("llama"))._model, None, None)
    target._model.load_state_dict(model.state_dict(), strict=False)
    target._model.lm_head.bias = model.lm_head.bias
    check_reading(target)
    assert target.readout.bias_V is not None
    final = torch.randn(2, 32)
    some = torch.tensor([7, 3])
    torch.testing.assert_close(
        target.readout.logits(final, some), target.readout.logits(final)[:, some]
    )


def test_a_family_that_does_something_else_to_logits_is_refused() -> None:
    target = target_of(small("llama"))
    target._model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(MismatchError, match="'llama' makes other logits of its final hidden"):
        check_reading(target)


def test_out_of_memory_says_what_to_lower() -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no")

    _, target = pair("qwen2")
    hook = target.layers[1].register_forward_pre_hook(fail)
    try:
        with (
            choose_target_path("plain"),
            pytest.raises(CapacityError, match="cpu ran out of memory reading 11 tokens at once"),
        ):
            target.read(token_ids(11), make_documents([11], CPU), (1, 2))
    finally:
        hook.remove()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)
