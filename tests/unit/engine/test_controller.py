"""The controller on machines made of numbers: near the best fixed setting, never under plain.

tests/unit/engine/controller_simulation.py says how a run is simulated; the larger grid is in
tools/measure_controller.py.
"""

import pytest

from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.controller import AdaptiveController, FixedController, make_controller
from fledge.engine.draft_plan import CycleReport, Load
from tests.unit.engine.controller_simulation import Run, best_fixed
from tests.unit.engine.simulated_machines import MACHINES, MAX_PASS_TOKENS
from tests.unit.engine.simulated_trees import ACCURACIES, TREE, TreeBank

_WARM_UP = 250
_CYCLES = 900
_ACCURACY = {accuracy.name: accuracy for accuracy in ACCURACIES}
_MACHINE = {machine.name: machine for machine in MACHINES}
_CASES = [
    ("memory-bound, cheap head", "good", 1),
    ("memory-bound, cheap head", "good", 64),
    ("memory-bound, dear head", "poor", 16),
    ("launch-bound", "middling", 16),
    ("cpu with offset", "mixed", 4),
    ("linear from the first token", "poor", 1),
    ("linear, dear head", "good", 16),
]


@pytest.mark.parametrize(("machine_name", "accuracy_name", "num_requests"), _CASES)
def test_near_the_best_fixed_setting_and_never_under_plain(
    machine_name: str, accuracy_name: str, num_requests: int
) -> None:
    machine = _MACHINE[machine_name]
    bank = TreeBank(_ACCURACY[accuracy_name], num_requests)
    times = machine.pass_times(distortion=0.1, seed=1)
    run = Run(machine, AdaptiveController(TREE, times, max_pass_tokens=MAX_PASS_TOKENS))
    run.cycles(bank, _CYCLES)
    best = best_fixed(machine, bank)
    assert run.rate(_WARM_UP) >= 0.95 * best.rate
    assert run.rate() >= 0.98 * best.plain_rate


def test_a_head_that_turns_bad_is_left_alone() -> None:
    machine = _MACHINE["memory-bound, dear head"]
    good, poor = (TreeBank(_ACCURACY[name], 16) for name in ("good", "poor"))
    times = machine.pass_times()
    run = Run(machine, AdaptiveController(TREE, times, max_pass_tokens=MAX_PASS_TOKENS))
    run.cycles(good, 300)
    assert run.rate(100) > 1.3 * best_fixed(machine, good).plain_rate
    run.cycles(poor, 600)
    assert run.rate(500) >= 0.97 * best_fixed(machine, poor).rate


def test_the_fixed_controller_does_what_it_is_told() -> None:
    tree = TreeSettings(depth=3, width=2, budget=5)
    controller = FixedController(tree, max_pass_tokens=64)
    plan = controller.choose(Load(num_requests=4, num_other_tokens=1000))
    assert (plan.depth, plan.width, plan.nodes) == (3, 2, 20)
    assert controller.choose(Load(num_requests=20)).nodes == 43
    assert controller.choose(Load(num_requests=63)).is_plain
    assert controller.state()["controller"] == "fixed"


def test_without_pass_times_the_settings_are_followed() -> None:
    settings = EngineSettings()
    assert isinstance(make_controller(settings, None, max_pass_tokens=64), FixedController)
    times = MACHINES[0].pass_times()
    chosen = make_controller(settings, times, max_pass_tokens=64)
    assert isinstance(chosen, AdaptiveController)
    fixed = EngineSettings(controller="fixed")
    assert isinstance(make_controller(fixed, times, max_pass_tokens=64), FixedController)


def test_cycles_that_compile_say_nothing_of_what_cycles_cost() -> None:
    machine, bank = _MACHINE["memory-bound, cheap head"], TreeBank(_ACCURACY["good"], 1)
    controller = AdaptiveController(TREE, machine.pass_times(), max_pass_tokens=MAX_PASS_TOKENS)
    run = Run(machine, controller)
    run.cycles(bank, 20)
    load = Load(num_requests=1, context_tokens=100, unread=(1,))
    for _ in range(30):
        plan = controller.choose(load)
        controller.observe(
            CycleReport(
                plan=plan,
                load=load,
                target_s=5.0,
                draft_s=0.0 if plan.is_plain else 5.0,
                other_s=0.0,
                emitted=1,
                is_cold=True,
            )
        )
    run.cycles(bank, 300)
    assert run.rate(100) >= 0.95 * best_fixed(machine, bank).rate
