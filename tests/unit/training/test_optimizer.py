"""The learning rate, clipping and the average, against what their formulas say."""

import math

import pytest
import torch
from torch import nn

from fledge.contracts.train_settings import OptimizerKind, OptimizerSettings
from fledge.training.muon import orthogonal
from fledge.training.optimizer import Optimizer, average_decay, learning_rate


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def give_gradients(module: nn.Module, size: float = 1.0) -> None:
    for number, weight in enumerate(module.parameters()):
        weight.grad = torch.full_like(weight, size * (number + 1))


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup=0.1, min_ratio=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_run_without_warm_up_begins_at_the_full_rate() -> None:
    settings = OptimizerSettings(learning_rate=2e-3, warmup=0.0)
    assert learning_rate(settings, 0, 10) == 2e-3
    assert learning_rate(settings, 0, 1) == 2e-3


def test_steps_are_those_of_adamw() -> None:
    ours, theirs = network(), network()
    settings = OptimizerSettings(warmup=0.0, clip=0.0, weight_decay=0.1, learning_rate=0.01)
    optimizer = Optimizer(ours, settings, 5)
    matrices = [weight for weight in theirs.parameters() if weight.dim() == 2]
    others = [weight for weight in theirs.parameters() if weight.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for step in range(5):
        for module in (ours, theirs):
            give_gradients(module, 1.0 + step)
        optimizer.clip()
        optimizer.step(step)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(settings, step, 5)
        adamw.step()
    for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert all(weight.grad is None for weight in ours.parameters())


def test_gradients_are_shortened_to_the_largest_norm() -> None:
    module = network()
    optimizer = Optimizer(module, OptimizerSettings(clip=0.5), 10)
    give_gradients(module)
    expected = math.sqrt(sum(float(one.grad.square().sum()) for one in module.parameters()))
    assert float(optimizer.clip()) == pytest.approx(expected)
    clipped = math.sqrt(sum(float(one.grad.square().sum()) for one in module.parameters()))
    assert clipped == pytest.approx(0.5, rel=1e-4)


def test_without_clipping_gradients_stay() -> None:
    module = network()
    optimizer = Optimizer(module, OptimizerSettings(clip=0.0), 10)
    give_gradients(module, 100.0)
    optimizer.clip()
    assert float(next(module.parameters()).grad.max()) == 100.0


def test_the_average_follows_its_recurrence() -> None:
    module = network()
    optimizer = Optimizer(module, OptimizerSettings(ema=0.7, warmup=0.0), 20)
    expected = {name: one.detach().clone() for name, one in module.named_parameters()}
    for step in range(20):
        give_gradients(module)
        optimizer.step(step)
        decay = min(0.7, (1 + step) / (10 + step))
        assert average_decay(0.7, step) == decay
        for name, weight in module.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * weight.detach()
    assert optimizer.shown is optimizer.average
    for name, weight in module.named_parameters():
        assert torch.allclose(optimizer.shown[name], expected[name], atol=1e-6)
        assert not torch.allclose(optimizer.shown[name], weight, atol=1e-6)


def test_without_an_average_the_weights_are_shown() -> None:
    module = network()
    optimizer = Optimizer(module, OptimizerSettings(), 20)
    assert optimizer.average is None
    assert optimizer.shown.keys() == dict(module.named_parameters()).keys()
    assert not any(tensor.requires_grad for tensor in optimizer.shown.values())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_is_remembered_can_be_put_back(kind: OptimizerKind) -> None:
    first, second = network(), network()
    settings = OptimizerSettings(warmup=0.0, kind=kind)
    ours, theirs = Optimizer(first, settings, 6), Optimizer(second, settings, 6)
    assert all(float(one.sum()) == 0 for kinds in ours.moments().values() for one in kinds.values())
    for step in range(3):
        give_gradients(first, 1.0 + step)
        ours.step(step)
    for name, kinds in theirs.moments().items():
        for kind, moment in kinds.items():
            moment.copy_(ours.moments()[name][kind])
    theirs.set_steps(3)
    second.load_state_dict(first.state_dict())
    for module, optimizer in ((first, ours), (second, theirs)):
        give_gradients(module)
        optimizer.step(3)
    for weight, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(weight, other)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradients_that_are_no_numbers_leave_the_weights_alone_on_a_gpu(
    kind: OptimizerKind,
) -> None:
    """One kernel for the whole step, which can be had on a CPU too, looks for itself."""
    module = network()
    settings = OptimizerSettings(warmup=0.0, kind=kind, weight_decay=0.1, muon_decay=0.1)
    optimizer = Optimizer(module, settings, 10, is_fused=True)
    give_gradients(module)
    optimizer.clip()
    optimizer.step(0)
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    moments = {
        name: {kind: one.clone() for kind, one in kinds.items()}
        for name, kinds in optimizer.moments().items()
    }
    give_gradients(module, math.nan)
    assert math.isnan(float(optimizer.clip()))
    optimizer.step(1)
    for name, weight in module.named_parameters():
        assert torch.equal(weight, before[name])
        for kind, moment in optimizer.moments()[name].items():
            assert torch.equal(moment, moments[name][kind])
    give_gradients(module)
    optimizer.clip()
    optimizer.step(2)
    assert not torch.equal(next(module.parameters()), next(iter(before.values())))


def test_a_step_that_is_skipped_leaves_the_average_alone() -> None:
    module = network()
    optimizer = Optimizer(module, OptimizerSettings(ema=0.7, warmup=0.0), 10, is_fused=True)
    for step, size in enumerate((1.0, math.inf, 1.0)):
        before = {name: one.clone() for name, one in (optimizer.average or {}).items()}
        give_gradients(module, size)
        optimizer.clip()
        optimizer.step(step)
        is_same = [torch.equal(before[name], one) for name, one in optimizer.shown.items()]
        assert is_same == [size == math.inf] * len(is_same)


def test_weights_with_units_are_learned_as_multiples_of_them() -> None:
    """As if the inputs were divided by their sizes first, bit by bit."""
    ours, theirs = network(), network()
    units = torch.tensor([0.25, 1.0, 2.0, 64.0])
    settings = OptimizerSettings(warmup=0.0, clip=0.5, weight_decay=0.1, learning_rate=0.01)
    with torch.no_grad():
        ours[0].weight.mul_(units)
    in_units = Optimizer(ours, settings, 5, units={"0.weight": units})
    ordinary = Optimizer(theirs, settings, 5)
    inputs = torch.tensor([[1.0, -2.0, 0.5, 0.125], [3.0, 1.0, -1.0, 0.25]])
    for step in range(5):
        ours(inputs / units).square().sum().backward()
        theirs(inputs).square().sum().backward()
        assert torch.equal(in_units.clip(), ordinary.clip())
        in_units.step(step)
        ordinary.step(step)
    assert torch.equal(ours[0].weight, theirs[0].weight * units)
    assert torch.equal(ours[1].weight, theirs[1].weight)


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((24, 64), (64, 24)):
        matrix = torch.randn(shape) * torch.logspace(0, -1, shape[1])
        values = torch.linalg.svdvals(orthogonal(matrix))
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.3
    assert not orthogonal(torch.zeros(3, 4)).any()


def test_muon_moves_matrices_equally_far_in_all_directions_and_leaves_adamw_the_rest() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {"wide": nn.Linear(64, 16), "tall": nn.Linear(16, 64), "lm_head": nn.Linear(32, 48)}
    )
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    settings = OptimizerSettings(
        kind="muon", muon_rate=0.1, warmup=0.5, learning_rate=0.01, clip=0.0
    )
    optimizer = Optimizer(module, settings, 4)
    for weight in module.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step(0)
    adamw = ["exp_avg", "exp_avg_sq"]
    kinds = {name: sorted(kinds) for name, kinds in optimizer.moments().items()}
    assert kinds == {
        name: ["momentum"] if name in ("wide.weight", "tall.weight") else adamw for name in before
    }
    moved = {name: one.detach() - before[name] for name, one in module.named_parameters()}
    # Half of the warm-up: half of each rate.
    assert float(moved["lm_head.weight"].abs().mean()) == pytest.approx(0.005, rel=0.01)
    for name, size in (("wide.weight", 0.05), ("tall.weight", 0.1)):
        values = torch.linalg.svdvals(moved[name])
        assert 0.6 * size < float(values.min())
        assert float(values.max()) < 1.3 * size


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_decay_bounds_what_muon_moves_and_nothing_else(decay: float) -> None:
    module = network()
    settings = OptimizerSettings(
        kind="muon", muon_rate=0.1, muon_decay=decay, warmup=0.0, learning_rate=1e-9, min_ratio=1.0
    )
    optimizer = Optimizer(module, settings, 60)
    others = {
        name: one.detach().clone() for name, one in module.named_parameters() if one.dim() < 2
    }
    for step in range(60):
        # The same direction again and again.
        give_gradients(module)
        optimizer.clip()
        optimizer.step(step)
    for name, weight in module.named_parameters():
        if weight.dim() == 2 and "lm_head" not in name:
            largest = float(torch.linalg.matrix_norm(weight.detach(), ord=2))
            scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
            assert (largest < 1.3 * scale / 2.0) == (decay == 2.0)
        elif name in others:
            torch.testing.assert_close(weight.detach(), others[name], rtol=0, atol=1e-6)
