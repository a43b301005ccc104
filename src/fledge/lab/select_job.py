"""What a selection is about: a target, heads, prompts, a device; known before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.toml_settings import to_plain
from fledge.lab.candidates import Candidate, find_candidates, fingerprints
from fledge.lab.suite_prompts import Prompt, Suite
from fledge.lab.suites import load_suite
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target, target_name
from fledge.models.self_check import TESTED_MODEL_TYPES, check_same_as_transformers
from fledge.models.target import Target
from fledge.models.target_facts import read_facts
from fledge.models.weights_identity import weights_identity
from fledge.store.manifest import SCORECARD, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectJob:
    target: str
    directory: Path
    origin: str
    """Where the target came from."""

    device: torch.device
    dtype: torch.dtype
    suites: tuple[Suite, ...]
    candidates: tuple[Candidate, ...]
    fingerprints: dict[str, str]
    """Of the heads, by name."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Of all suites; tasks of one name in several suites are told apart."""
        tasks = [task for suite in self.suites for task in suite.tasks]
        return tuple(
            replace(prompt, task=f"{suite.name}/{prompt.task}")
            if tasks.count(prompt.task) > 1
            else prompt
            for suite in self.suites
            for prompt in suite.prompts
        )

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        """Which device, in words that outlive the run."""
        if self.device.type == "cuda":
            return str(torch.cuda.get_device_name(self.device))
        return "cpu"

    def plan(self, settings: SelectSettings) -> Plan:
        facts = read_facts(self.directory)
        return Plan(
            kind=SCORECARD,
            settings=to_plain(settings),
            parents={f"head {name}": found for name, found in self.fingerprints.items()},
            identity={
                "target": target_name(self.target),
                "weights": weights_identity(self.directory),
                "tokenizer": facts.tokenizer.identity,
                "suites": {suite.name: suite.fingerprint for suite in self.suites},
                "dtype": self.precision,
                # Times of two machines do not go together.
                "device": self.device_name,
            },
        )

    def load_target(self, progress: Progress) -> Target:
        progress.note(f"{self.target}: {self.origin}; running in {self.precision} on {self.device}")
        with progress.task(f"loading {self.target}", unit=""):
            target = Target.load(self.directory, dtype=self.dtype, device=self.device)
            if target.config.model_type not in TESTED_MODEL_TYPES:
                check_same_as_transformers(target)
        return target


def prepare_job(
    heads: Sequence[Path],
    target: str,
    settings: SelectSettings,
    *,
    device: str = "auto",
    needs_weights: bool = True,
    progress: Progress,
) -> SelectJob:
    """Find everything that is named; what is wrong is said before the target is loaded."""
    return prepare_candidates(
        find_candidates(heads),
        target,
        settings,
        device=device,
        needs_weights=needs_weights,
        progress=progress,
    )


def prepare_candidates(
    candidates: Sequence[Candidate],
    target: str,
    settings: SelectSettings,
    *,
    device: str,
    needs_weights: bool,
    progress: Progress,
) -> SelectJob:
    """The same for heads that were found already."""
    suites = _load_suites(settings, progress)
    resolved = resolve_target(target, progress=progress, needs_weights=needs_weights)
    place = pick_device(device)
    return SelectJob(
        target=target,
        directory=resolved.directory,
        origin=resolved.origin,
        device=place,
        dtype=pick_dtype(settings.dtype, place),
        suites=suites,
        candidates=tuple(candidates),
        fingerprints=fingerprints(candidates, progress),
    )


def _load_suites(settings: SelectSettings, progress: Progress) -> tuple[Suite, ...]:
    suites = tuple(
        load_suite(name, max_prompts=settings.prompts, progress=progress)
        for name in settings.suites
    )
    names = [suite.name for suite in suites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the suite {twice} is named twice; name each suite once.")
    return suites


def describe_job(job: SelectJob) -> dict[str, Any]:
    """What a scorecard says about its conditions, as far as the job knows them."""
    return {
        "target": job.target,
        "dtype": job.precision,
        "device": job.device_name,
        "suites": [
            {
                "name": suite.name,
                "source": suite.source,
                "fingerprint": suite.fingerprint,
                "num_prompts": len(suite.prompts),
            }
            for suite in job.suites
        ],
    }
