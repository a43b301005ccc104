"""What features in fewer bits cost: the same head trained from each format, judged on exact ones.

    python tools/measure_compression.py CORPUS --target T --work DIR --json benchmarks/x.json \
        --set train.epochs=3

Each format is captured and trained from as a user would; then every head is measured on the same
held-out samples, read by the live target: what serving would give it. Speeds and bytes come from
the same run.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from fledge.cli.progress import terminal_progress
from fledge.contracts import provenance
from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.recipe import Recipe, load_recipe
from fledge.contracts.train_settings import TrainSettings
from fledge.features import capture_job
from fledge.features.capture import capture
from fledge.features.feature_store import FeatureStore
from fledge.models.head_files import load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.target import Target
from fledge.training.assembly import assemble, load_target
from fledge.training.distributed import Processes
from fledge.training.offline import OfflineSource
from fledge.training.sources import iterate
from fledge.training.stage import measure_speed, train
from fledge.training.train_input import TrainInput, open_input

FORMATS: dict[str, dict[str, Any]] = {
    "exact": {"features": "exact", "target": "hidden", "target_features": "exact"},
    "q8": {"features": "q8", "target": "hidden", "target_features": "q8"},
    "q6": {"features": "q6", "target": "hidden", "target_features": "q6"},
    "q5": {"features": "q5", "target": "hidden", "target_features": "q5"},
    "q5+q8": {"features": "q5", "target": "hidden", "target_features": "q8"},
    "q4": {"features": "q4", "target": "hidden", "target_features": "q4"},
    "q4+q8": {"features": "q4", "target": "hidden", "target_features": "q8"},
    "q5+top64": {"features": "q5", "target": "topk", "top_k": 64},
}
"""How taps are kept, and the target's distribution; `q5+q8` keeps final rows in 8 bits."""


class Laboratory:
    """One corpus, one target, and the same settings of training for every format."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.corpus, self.work = arguments.corpus, arguments.work
        self.target_name: str = arguments.target
        self.device = pick_device(arguments.device)
        self.recipe: Recipe = load_recipe(None, arguments.assignments)
        self.progress = terminal_progress()
        self._online = self.given(features=None)
        self.target: Target = load_target(self._online, self.recipe.train, self.progress)

    def given(self, features: Path | None) -> TrainInput:
        return open_input(
            features=features,
            corpora=[] if features else [self.corpus],
            target=self.target_name,
            settings=self.recipe.train,
            capture=self.recipe.capture,
            is_capture_asked=False,
            device=self.device,
            progress=self.progress,
        )

    def capture(self, name: str, **layers: Any) -> dict[str, Any]:
        """Make the features of a format; bytes and speed."""
        format_settings = FORMATS["exact" if layers else name]
        settings = dataclasses.replace(self.recipe.capture, **format_settings, **layers)
        assert isinstance(settings, CaptureSettings)
        given = capture_job.open_input(
            self.corpus,
            self.target_name,
            settings,
            dtype=pick_dtype(self.recipe.train.dtype, self.device),
            device=self.device,
            progress=self.progress,
        )
        started = time.perf_counter()
        manifest = capture(given, self.work / f"features-{name}", self.progress)
        tokens = manifest.counts["tokens"]
        stored = sum(entry["bytes"] for entry in manifest.files.values())
        return {
            "bytes_per_token": stored / tokens,
            "bytes_of_8h": stored / tokens / (8 * self.target.hidden_size),
            "tokens": tokens,
            "label_share": manifest.counts["label_rows"] / tokens,
            "capture_s_with_loading": time.perf_counter() - started,
        }

    def train(self, name: str, seed: int) -> dict[str, Any]:
        """Train from a format, and measure the head on what the live target says."""
        settings = dataclasses.replace(self.recipe.train, seed=seed)
        return self.run(self.work / f"features-{name}", settings, f"{name}-{seed}")

    def run(self, features: Path, settings: TrainSettings, name: str) -> dict[str, Any]:
        """Train with some settings; figures on what the live target says."""
        out = self.work / f"run-{name}"
        given = self.given(features)
        started = time.perf_counter()
        manifest = train(given, settings, out, target=self.target, progress=self.progress)
        took_s = time.perf_counter() - started
        measured = self._measure(out, settings, given)
        return {
            "seed": settings.seed,
            "steps": manifest.counts["steps"],
            "train_s": took_s,
            **measure_speed(out),
            "ideal_speed_up": measured["ideal_speed_up"],
            "acceptance_at_depth": measured["acceptance_at_depth"],
            "loss": measured["loss"],
            "num_labels": measured["num_labels"],
        }

    def _measure(self, run: Path, settings: TrainSettings, given: TrainInput) -> dict[str, Any]:
        # The seed chooses what is measured, and the loss how deep: the same for all heads.
        held_out = dataclasses.replace(settings.held_out, decode_prompts=0)
        common = dataclasses.replace(
            settings, held_out=held_out, seed=self.recipe.train.seed, loss=self.recipe.train.loss
        )
        online = dataclasses.replace(self._online, taps=given.taps)
        parts = assemble(online, common, self.target, Processes(device=self.device))
        weights = load_head(run).state_dict()
        parts.module.head.load_state_dict(weights)  # type: ignore[union-attr]
        assert parts.measurer is not None
        return parts.measurer.measure(weights).depth.as_record()

    def error(self, name: str, *, num_samples: int = 64) -> float:
        """Relative error of decoded taps: of the whole, in root mean square."""
        stores = [FeatureStore.open(self.work / f"features-{one}") for one in ("exact", name)]
        wrong = whole = 0.0
        both = [OfflineSource(one, device=self.device, dtype=torch.float32) for one in stores]
        plans = [[n] for n in range(min(num_samples, len(both[0].samples.lengths)))]
        for exact, coded in zip(*(iterate(one, plans) for one in both), strict=True):
            difference = coded.features_TF - exact.features_TF
            wrong += float(difference.double().square().sum())
            whole += float(exact.features_TF.double().square().sum())
        return float((wrong / whole) ** 0.5)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """What every measurement of trained heads is told."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    return parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    arguments = parser.parse_args()
    laboratory = Laboratory(arguments)
    report: dict[str, Any] = {
        "what": "heads trained from features in fewer bits",
        "target": arguments.target,
        "settings": arguments.assignments,
        "formats": {},
        "provenance": provenance.collect(device=str(laboratory.device), commit=arguments.commit),
    }
    for name in arguments.formats:
        entry = laboratory.capture(name)
        if name != "exact":
            entry["relative_error"] = laboratory.error(name)
        entry["runs"] = []
        report["formats"][name] = entry
        for seed in arguments.seeds:
            entry["runs"].append(laboratory.train(name, seed))
            # Written as it goes: a lease may end at any time.
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
            print(name, json.dumps(entry["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()
