"""Each default of training against its rivals: the same data, the same steps, one thing changed.

    python tools/measure_defaults.py CORPUS --target T --work DIR --json benchmarks/x.json \
        --set train.epochs=2

Heads are trained from exact features and measured on the same held-out samples, read by the live
target. Goes on where it stopped: finished runs are not made again.
"""

import json
from typing import Any

from measure_compression import Laboratory, make_parser

from fledge.contracts import provenance
from fledge.contracts.recipe import load_recipe

TOP_LAYER = "top layer only"

RIVALS: dict[str, list[str]] = {
    "default": [],
    "default, another seed": ["train.seed=1"],
    "mean over all positions": ["train.loss.mean=positions"],
    "step weight 1.0": ["train.loss.step_decay=1.0"],
    "step weight 0.9": ["train.loss.step_decay=0.9"],
    "best token in the vocabulary": ["train.loss.greedy_in_vocab_only=true"],
    "norm before residual": ["train.head.norm_before_residual=true"],
    "rope theta 10000": ["train.head.rope_theta=10000.0"],
    "random output rows": ["train.head.lm_head_from_target=false"],
    "EAGLE-3.1 norms": ["train.head.fc_norm=true", "train.head.norm_output=true"],
    "acceptance loss": ["train.loss.kind=acceptance"],
    "blended loss": ["train.loss.kind=blend"],
    "target at temperature 0.5": ["train.loss.target_temperature=0.5"],
    "both at temperature 0.5": [
        "train.loss.target_temperature=0.5",
        "train.loss.draft_temperature=0.5",
    ],
    "3 steps in the first half": ["train.loss.early_steps=3"],
    "hidden noise 0.05": ["train.hidden_noise=0.05"],
    "EMA 0.99": ["train.optimizer.ema=0.99"],
    "3 steps": ["train.loss.steps=3"],
    "feature loss": ["train.loss.feature_weight=0.1"],
    TOP_LAYER: [],
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[*RIVALS], choices=[*RIVALS])
    arguments = parser.parse_args()
    laboratory = Laboratory(arguments)
    report: dict[str, Any] = {
        "what": "defaults of training against their rivals",
        "target": arguments.target,
        "settings": arguments.assignments,
        "runs": {},
        "provenance": provenance.collect(device=str(laboratory.device), commit=arguments.commit),
    }
    laboratory.capture("exact")
    for name in arguments.only:
        features = laboratory.work / "features-exact"
        if name == TOP_LAYER:
            laboratory.capture("top", layers=(laboratory.target.num_layers,))
            features = laboratory.work / "features-top"
        changed = load_recipe(None, [*arguments.assignments, *RIVALS[name]]).train
        run = laboratory.run(features, changed, name.replace(" ", "-"))
        report["runs"][name] = {"changed": RIVALS[name], **run}
        # Written as it goes: a lease may end at any time.
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        print(name, json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
