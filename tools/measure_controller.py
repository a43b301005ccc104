"""The controller on simulated machines, over all machines, heads and loads of the simulation.

    python tools/measure_controller.py --out benchmarks/FILE.json

Rates are tokens per second over the best fixed setting (found by trying all) after 250 cycles, and
over plain decoding from the first cycle on. tests/unit/engine/controller_simulation.py says how a
run is simulated. Captured cycles of batches that are filled at once and empty are simulated by
captured_simulation.py beside it, all sizes after each other under one controller; their rates are
those of whole batches over plain decoding. A head that is never right, then right as often as the
others, shows what it costs until it sleeps, while it does, and how soon it is found out. Where 256
requests gain nothing by drafts and taking them up is dear, batches after the first show what not
changing hands is worth; and after texts that were hard, how soon drafting comes back.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fledge.contracts import provenance
from fledge.engine.controller import AdaptiveController
from tests.unit.engine.captured_simulation import CAPTURED_MACHINES, LEVEL, RIGHT, CapturedRun
from tests.unit.engine.controller_simulation import Run, best_fixed
from tests.unit.engine.simulated_machines import MACHINES, MAX_PASS_TOKENS, Machine
from tests.unit.engine.simulated_trees import ACCURACIES, TREE, Accuracy, TreeBank

WARM_UP = 250
LOADS = (1, 4, 16, 64, 256)
CAPTURED_LOADS = (8, 64, 1, 32, 128, 256)
SEEDS = range(3)
USELESS_BATCHES = 20
LEVEL_SEEDS, LEVEL_BATCHES = range(8), 8
HARD, HARD_BATCHES, MOST_BATCHES = 0.1, 6, 24


def measure(machine: Machine, accuracy: Accuracy, bank: TreeBank, cycles: int) -> dict[str, object]:
    times = machine.pass_times(distortion=0.1, seed=1)
    run = Run(machine, AdaptiveController(TREE, times, max_pass_tokens=MAX_PASS_TOKENS))
    run.cycles(bank, cycles)
    best = best_fixed(machine, bank)
    return {
        "machine": machine.name,
        "head": accuracy.name,
        "requests": bank.num_requests,
        "best_over_plain": round(best.rate / best.plain_rate, 4),
        "over_best": round(run.rate(WARM_UP) / best.rate, 4),
        "over_plain": round(run.rate() / best.plain_rate, 4),
    }


def measure_captured(name: str, seed: int) -> list[dict[str, Any]]:
    machine = CAPTURED_MACHINES[name]
    return [
        {
            "machine": name,
            "seed": seed,
            "requests": size,
            "over_plain": [round(float(rate / machine.plain_rate(size)), 4) for rate in rates],
        }
        for size, rates in CapturedRun(machine, seed).rates(CAPTURED_LOADS).items()
    ]


def measure_useless(num_requests: int, seed: int) -> dict[str, Any]:
    machine = CAPTURED_MACHINES["as measured"]
    run = CapturedRun(machine, seed, right=0.0)

    def serve() -> float:
        return round(float(run.serve(num_requests) / machine.plain_rate(num_requests)), 4)

    def is_asleep() -> bool:
        return run.controller.is_asleep

    awake: list[float] = []
    while not is_asleep():
        awake.append(serve())
    run.num_told = run.num_plain = 0
    asleep = [serve() for _ in range(USELESS_BATCHES)]
    state, share_told = run.controller.state(), run.num_told / (run.num_told + run.num_plain)
    run.right, num_batches = RIGHT, 0
    while is_asleep():
        run.serve(num_requests)
        num_batches += 1
    return {
        "requests": num_requests,
        "seed": seed,
        "over_plain_until_asleep": awake,
        "over_plain_asleep": round(sum(asleep) / len(asleep), 4),
        "worst_batch_asleep": min(asleep),
        "exams": state["num_exams"],
        "share_of_tokens_told": round(share_told, 4),
        "batches_until_found_out": num_batches,
    }


def measure_level(seed: int) -> dict[str, Any]:
    run = CapturedRun(LEVEL, seed)
    run.serve(32)
    first, run.num_hand_overs = run.serve(256), 0
    run.nodes.clear()
    rates = [run.serve(256) for _ in range(LEVEL_BATCHES)]
    plain_rate = LEVEL.plain_rate(256)
    return {
        "requests": 256,
        "seed": seed,
        "over_plain_first": round(float(first / plain_rate), 4),
        "over_plain": [round(float(rate / plain_rate), 4) for rate in rates],
        "hand_overs": run.num_hand_overs,
        "cycles": sum(run.nodes.values()),
        "cycles_with_drafts": sum(count for (_, each), count in run.nodes.items() if each),
    }


def measure_return(num_requests: int, seed: int) -> dict[str, Any]:
    """After texts that are hard to draft for come those that are not."""
    machine = replace(LEVEL, is_shrinking=True)
    run = CapturedRun(machine, seed)
    plain_rate, usual = machine.plain_rate(num_requests), run.serve(num_requests)
    run.right = HARD
    hard = [run.serve(num_requests) for _ in range(HARD_BATCHES)]
    run.right, num_batches = RIGHT, 1
    # Half of what was gained before.
    while run.serve(num_requests) < (usual + plain_rate) / 2 and num_batches < MOST_BATCHES:
        num_batches += 1
    return {
        "requests": num_requests,
        "seed": seed,
        "over_plain_before": round(float(usual / plain_rate), 4),
        "over_plain_hard": round(float(sum(hard) / len(hard) / plain_rate), 4),
        "batches_until_back": num_batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for accuracy in ACCURACIES:
        for num_requests in LOADS:
            bank = TreeBank(accuracy, num_requests)
            rows += [measure(machine, accuracy, bank, options.cycles) for machine in MACHINES]
            print(json.dumps(rows[-len(MACHINES) :]), flush=True)
    captured = [
        row for name in CAPTURED_MACHINES for seed in SEEDS for row in measure_captured(name, seed)
    ]
    useless = [measure_useless(size, seed) for size in sorted(CAPTURED_LOADS) for seed in SEEDS]
    level = [measure_level(seed) for seed in LEVEL_SEEDS]
    returns = [measure_return(size, seed) for size in sorted(CAPTURED_LOADS)[:-1] for seed in SEEDS]
    level_rates = [rate for row in level for rate in row["over_plain"]]
    document = {
        "provenance": provenance.collect(device="cpu", commit=options.commit),
        "cycles": options.cycles,
        "warm_up": WARM_UP,
        "worst_over_best": min(float(str(row["over_best"])) for row in rows),
        "worst_over_plain": min(float(str(row["over_plain"])) for row in rows),
        "worst_captured_over_plain": min(min(row["over_plain"]) for row in captured),
        "worst_useless_over_plain": min(row["over_plain_asleep"] for row in useless),
        "mean_level_over_plain": round(sum(level_rates) / len(level_rates), 4),
        "worst_level_over_plain": min(level_rates),
        "rows": rows,
        "captured": captured,
        "useless": useless,
        "level": level,
        "returns": returns,
    }
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print({name: number for name, number in document.items() if "over" in name})


if __name__ == "__main__":
    main()
