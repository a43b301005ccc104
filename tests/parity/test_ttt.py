"""Training-time test: the fast path against the twin, the twin against its definition.

The definition is a head that recomputes everything for one index at a time, as if it were drafting
there: see `reference_head`. Catches: a shift by one of tokens, features, labels or positions, keys
of a later step seen by another index, a window that counts keys instead of positions, documents
that see each other, losses on rows that are not asked, and a gradient that misses a part.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fledge.contracts.errors import ConfigError
from fledge.contracts.train_settings import LossSettings
from fledge.models.head import Eagle3Head
from fledge.models.head_files import save_head
from fledge.models.target_reading import Readout
from fledge.models.turned_rows import TurnedRows, target_rows
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.testing import target_of, tiny_head, tiny_model
from fledge.training.offline import TemperedShare
from fledge.training.step_sums import StepSums
from fledge.training.ttt import TTTModule, TTTResult, add_noise, count_labels
from tests.parity.reference_head import ReferenceHead
from tests.parity.ttt_batches import LENGTHS, one_document, random_batch, random_readout

TARGET = target_of(tiny_model())
EMBEDDING_VD = TARGET.embedding.weight.detach()


def make_module(
    head: Eagle3Head,
    readout: Readout | None,
    dtype: torch.dtype,
    *,
    is_plain: bool,
    noise: float = 0.0,
    **loss: Any,
) -> TTTModule:
    return TTTModule(
        head,
        EMBEDDING_VD.to(dtype),
        readout,
        LossSettings(**loss),
        compute_dtype=dtype,
        hidden_noise=noise,
        is_plain=is_plain,
    )


def denominators(batch: MicroBatch, num_steps: int) -> Tensor:
    lengths = batch.documents.lengths
    return torch.from_numpy(count_labels(batch.loss_mask_T.numpy(), lengths, num_steps))


def run(
    module: TTTModule, batch: MicroBatch, *, seed: int = 3
) -> tuple[TTTResult, dict[str, Tensor]]:
    """Result and gradients."""
    module.head.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    result = module(batch, denominators(batch, module.loss.steps), generator)
    result.loss.backward()
    grads = {name: p.grad for name, p in module.head.named_parameters() if p.grad is not None}
    assert grads.keys() == dict(module.head.named_parameters()).keys()
    return result, grads


def assert_same(
    found: tuple[TTTResult, dict[str, Tensor]],
    expected: tuple[TTTResult, dict[str, Tensor]],
    tolerance: float,
) -> None:
    torch.testing.assert_close(found[0].loss, expected[0].loss, rtol=tolerance, atol=0)
    for name, one, other in zip(StepSums._fields, found[0].sums, expected[0].sums, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)
    largest = max(grad.abs().max().item() for grad in expected[1].values())
    for name, grad in expected[1].items():
        # Where a window lets an index see only itself, that of the query is zero but for rounding.
        scale = max(grad.abs().max().item(), 1e-2 * largest)
        torch.testing.assert_close(
            found[1][name], grad, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: n + m
        )


VARIANTS: list[dict[str, Any]] = [
    {},
    *({"steps": steps} for steps in (1, 2, 3, 5)),
    {"kind": "acceptance"},
    {"kind": "acceptance", "top_k": 5},
    {"kind": "blend"},
    {"kind": "blend", "target_temperature": 0.5, "chain_weights": True},
    {"target_temperature": 2.0, "soft_cap": 5.0},
    {"target_temperature": 0.5, "draft_temperature": 0.5, "feature_weight": 0.3},
    {"draft_temperature": 2.0, "kind": "acceptance", "top_k": 5},
    {"top_k": 5},
    {"greedy_in_vocab_only": True},
    {"feature_weight": 0.3},
    {"step_decay": 0.5, "noise": 0.2},
    {"chain_weights": True, "step_decay": 1.0},
    {"chain_weights": True, "kind": "acceptance", "top_k": 5},
    {"chain_weights": True, "start_share": 0.7, "kind": "blend"},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True},
    {"attention_bias": True, "num_heads": 6},
    {"num_heads": 2},
    *({"sliding_window": window} for window in (1, 2, 5, 9)),
    {"scale": 0.5, "soft_cap": 5.0, "has_bias": True},
    {"turned_rows": True},
    {"turned_rows": True, "kind": "acceptance", "top_k": 5, "draft_temperature": 0.5},
    {"turned_rows": True, "chain_weights": True, "feature_weight": 0.3},
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 5e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fast_equals_twin(variant: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    options = dict(variant)
    loss = {
        name: options.pop(name) for name in LossSettings.__dataclass_fields__ if name in options
    }
    noise, top_k = options.pop("noise", 0.0), options.pop("top_k", None)
    shape = {name: options.pop(name) for name in ("scale", "soft_cap") if name in options}
    if options.pop("has_bias", False):
        shape["bias_V"] = torch.linspace(-1, 1, TARGET.vocab_size, dtype=dtype)
    head = tiny_head(TARGET, **options).to(dtype)
    readout = random_readout(head, dtype, **shape)
    if isinstance(head.lm_head, TurnedRows):
        head.lm_head.rows_VD = target_rows(readout, head.draft_to_target_V).to(dtype)
    batch = random_batch(head, readout, dtype, top_k=top_k, padded_to=sum(LENGTHS) + 4)
    fast, twin = (
        make_module(head, readout, dtype, is_plain=is_plain, noise=noise, **loss)
        for is_plain in (False, True)
    )
    expected = run(twin, batch)
    assert_same(run(fast, batch), expected, tolerance)
    assert expected[0].sums.count_K.tolist() == denominators(batch, twin.loss.steps).tolist()


def test_a_rotation_of_another_type() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    head = tiny_head(TARGET, rope_scaling=scaling).double()
    readout = random_readout(head, torch.float64)
    batch = random_batch(head, readout, torch.float64)
    twin = run(make_module(head, readout, torch.float64, is_plain=True), batch)
    assert_same(run(make_module(head, readout, torch.float64, is_plain=False), batch), twin, 1e-11)


@pytest.mark.parametrize("is_plain", [True, False], ids=["twin", "fast"])
def test_packed_equals_one_document_at_a_time(is_plain: bool) -> None:
    head = tiny_head(TARGET, sliding_window=6).double()
    readout = random_readout(head, torch.float64)
    batch = random_batch(head, readout, torch.float64)
    module = make_module(head, readout, torch.float64, is_plain=is_plain)
    result, grads = run(module, batch)
    shared = denominators(batch, 7)
    head.zero_grad()
    alone = [module(one_document(batch, number), shared) for number in range(len(LENGTHS))]
    for one in alone:
        one.loss.backward()
    summed = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    sums = StepSums(*(sum(parts) for parts in zip(*(one.sums for one in alone), strict=True)))
    total = TTTResult(torch.stack([one.loss for one in alone]).sum(), sums)
    assert_same((total, summed), (result, grads), 1e-11)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True},
        {"sliding_window": 1},
        {"sliding_window": 4},
    ],
    ids=str,
)
def test_twin_equals_its_definition(flags: dict[str, Any], tmp_path: Path) -> None:
    head = tiny_head(TARGET, **flags)
    readout = random_readout(head, torch.float32)
    batch = random_batch(head, readout, torch.float32, lengths=(3, 1, 9, 2, 6))
    save_head(head, tmp_path / "head")
    reference = ReferenceHead(tmp_path / "head", EMBEDDING_VD)
    for kind, temperature, own in (
        ("soft_cross_entropy", 1.0, 1.0),
        ("acceptance", 0.5, 1.0),
        ("blend", 2.0, 2.0),
    ):
        loss = {"kind": kind, "target_temperature": temperature, "draft_temperature": own}
        batch = replace(batch, targets=described(batch.targets, readout, head, temperature))
        found = make_module(head, readout, torch.float32, is_plain=True, **loss)(
            batch, torch.ones(7, dtype=torch.long)
        )
        expected = defined_sums(reference, readout, head, batch, kind, temperature, own)
        for name, one, other in zip(StepSums._fields, found.sums, expected.T[:-1], strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=2e-4, atol=2e-4, err_msg=name)
        total = sum(0.8**step * expected[step, 0] for step in range(7))
        assert found.loss.item() == pytest.approx(total, rel=1e-4)
        chained = make_module(
            head, readout, torch.float32, is_plain=True, chain_weights=True, **loss
        )(batch, torch.ones(7, dtype=torch.long))
        total = sum(0.8**step * expected[step, -1] for step in range(7))
        assert chained.loss.item() == pytest.approx(total, rel=1e-4)


def described(
    targets: TargetRows, readout: Readout, head: Eagle3Head, temperature: float
) -> TargetRows:
    """What the target says at a temperature, as a source says it."""
    share = TemperedShare(readout, head.draft_to_target_V, temperature)
    return share.applied_to(targets)


def defined_loss(kind: str, p: Tensor, q: Tensor, accepted: Tensor) -> float:
    cross_entropy, accepted_share = -float((p * q.log()).sum()), float(accepted)
    if kind == "soft_cross_entropy":
        return cross_entropy
    if kind == "acceptance":
        return -math.log(accepted_share)
    weight = math.exp(-3 * accepted_share)
    return weight * cross_entropy + (1 - weight) * (1 - accepted_share)


@torch.no_grad()
def defined_sums(
    reference: ReferenceHead,
    readout: Readout,
    head: Eagle3Head,
    batch: MicroBatch,
    kind: str,
    temperature: float,
    own_temperature: float,
) -> np.ndarray[Any, Any]:
    """[step, field of StepSums], one index after another, one step after another.

    Behind the fields: the loss with each guess weighed by what is accepted before it.
    """
    sums = np.zeros((7, len(StepSums._fields) + 1))
    row_numbers = {int(row): number for number, row in enumerate(batch.targets.rows_R)}
    starts = batch.documents.starts
    draft_ids = head.draft_to_target_V
    for start, stop in zip(starts, starts[1:], strict=False):
        tokens = batch.token_ids_T[start:stop].tolist()
        fused = list(reference.fuse(batch.features_TF[start:stop]))
        for index in range(stop - start):
            is_chain, reached = True, 1.0
            hidden = fused[: index + 1]
            for step in range(min(7, stop - start - index - 1)):
                feedback, logprobs = reference.forward(
                    tokens[1 : index + 2 + step], torch.stack(hidden)
                )
                hidden = [*hidden, feedback[-1]]
                row = row_numbers.get(start + index + 1 + step)
                if row is None:
                    is_chain = False
                    continue
                final = batch.targets.final_RD
                assert final is not None
                p_full = (readout.logits(final[row]) / temperature).softmax(-1)
                p_kept = p_full[draft_ids]
                p, q = p_kept / p_kept.sum(), (logprobs[-1] / own_temperature).softmax(-1)
                accepted = torch.minimum(p_kept, q).sum()
                entropy = -(p * p.log()).sum()
                loss = defined_loss(kind, p, q, accepted)
                is_right = int(draft_ids[q.argmax()]) == int(p_full.argmax())
                was_chain, is_chain = is_chain, is_chain and is_right
                sums[step] += [
                    *(loss, 1, is_right, is_chain, was_chain),
                    *(float(accepted), float(entropy), reached * loss),
                ]
                reached *= float(accepted)
    return sums


def test_nothing_kept_for_the_backward_pass_grows_with_the_square() -> None:
    """Neither scores nor logits: a tensor of T x V or T x T is larger than any that is kept."""
    head = tiny_head(TARGET, draft_vocab_size=90)
    readout = random_readout(head, torch.float32)
    batch = random_batch(head, readout, torch.float32, lengths=(700, 600))
    num_tokens = batch.documents.num_tokens
    largest = {}
    for is_plain in (True, False):
        kept = [0]

        def note(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        module = make_module(head, readout, torch.float32, is_plain=is_plain, steps=2)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            module(batch, denominators(batch, 2))
        largest[is_plain] = max(kept)
    assert largest[True] > num_tokens * num_tokens
    # The fused features are the widest thing there is: three taps of 32.
    assert largest[False] == num_tokens * 96


@pytest.mark.parametrize(
    "weights", [{}, {"chain_weights": True}, {"chain_weights": True, "start_share": 1.0}], ids=str
)
def test_chunks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any]) -> None:
    head = tiny_head(TARGET).double()
    readout = random_readout(head, torch.float64)
    batch = random_batch(head, readout, torch.float64)
    module = make_module(head, readout, torch.float64, is_plain=False, **weights)
    expected = run(module, batch)
    few = {"cpu": 3 * 7 * 64}
    monkeypatch.setattr("fledge.ops.soft_target_chunks._LOGITS_AT_ONCE", few)
    assert_same(run(module, batch), expected, 1e-12)


@pytest.mark.parametrize("is_plain", [True, False], ids=["twin", "fast"])
def test_a_micro_batch_without_labels_has_a_gradient_of_zero(is_plain: bool) -> None:
    """One process may get such a batch while others wait for its gradients."""
    head = tiny_head(TARGET)
    readout = random_readout(head, torch.float32)
    batch = random_batch(head, readout, torch.float32, lengths=(2, 1, 2))
    assert batch.targets.rows_R.numel() == 0
    result, grads = run(make_module(head, readout, torch.float32, is_plain=is_plain), batch)
    assert result.loss.item() == 0
    assert all(not grad.any() for grad in grads.values())


def test_measuring_needs_no_gradient() -> None:
    head = tiny_head(TARGET)
    readout = random_readout(head, torch.float32)
    batch = random_batch(head, readout, torch.float32)
    module = make_module(head, readout, torch.float32, is_plain=False)
    with torch.no_grad():
        measured = module(batch, denominators(batch, 7))
    assert not measured.loss.requires_grad
    trained = module(batch, denominators(batch, 7))
    assert measured.loss.item() == trained.loss.item()
    assert all(torch.equal(a, b) for a, b in zip(measured.sums, trained.sums, strict=True))


def test_float32_weights_learn_from_bfloat16_products() -> None:
    head = tiny_head(TARGET)
    readout = random_readout(head, torch.float32)
    batch = random_batch(head, readout, torch.float32)
    exact = run(make_module(head, readout, torch.float32, is_plain=True), batch)
    for is_plain in (True, False):
        found = run(make_module(head, readout, torch.bfloat16, is_plain=is_plain), batch)
        assert all(grad.dtype == torch.float32 for grad in found[1].values())
        assert found[0].loss.item() == pytest.approx(exact[0].loss.item(), rel=0.02)
        for name, grad in exact[1].items():
            error = (found[1][name] - grad).norm() / grad.norm()
            assert error < 0.2, f"{name}: {error}"


def test_noise_is_a_share_of_each_feature_and_repeats() -> None:
    features = torch.randn(200, 30)
    noisy = add_noise(features, 0.1, torch.Generator().manual_seed(1))
    share = (noisy / features - 1).abs()
    assert 0.09 < share.max() <= 0.1001
    assert torch.equal(noisy, add_noise(features, 0.1, torch.Generator().manual_seed(1)))


def test_labels_are_counted_on_the_host() -> None:
    mask = np.array([1, 1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=bool)
    # Documents x0..x4 and y0..y4: rows 1 and 3 of the first, 1 and 3 of the second have labels.
    assert count_labels(mask, [5, 5], 4).tolist() == [4, 2, 2, 0]
    assert count_labels(mask[:5], [5], 2).tolist() == [2, 1]


def test_what_the_loss_lacks_is_said() -> None:
    head = tiny_head(TARGET)
    readout = random_readout(head, torch.float32)
    whole = random_batch(head, readout, torch.float32)
    tops = random_batch(head, readout, torch.float32, top_k=4)
    ones = torch.ones(7, dtype=torch.long)
    with pytest.raises(ConfigError, match="give TTTModule the target's readout"):
        make_module(head, None, torch.float32, is_plain=False)(whole, ones)
    with pytest.raises(ConfigError, match="hold top tokens instead of final hidden states"):
        make_module(head, readout, torch.float32, is_plain=False, feature_weight=1.0)(tops, ones)
    sharp = make_module(head, readout, torch.float32, is_plain=False, target_temperature=0.5)
    with pytest.raises(ConfigError, match=r"target_temperature is 0\.5, .* temperature 1 only"):
        sharp(tops, ones)
    narrow = tiny_head(TARGET)
    object.__setattr__(narrow.config, "hidden_size", 31)
    with pytest.raises(ConfigError, match="hidden size 31 is not the target's 32"):
        make_module(narrow, readout, torch.float32, is_plain=False, feature_weight=1.0)(whole, ones)
