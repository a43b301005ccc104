"""What a run is asked for, checked before any weight is loaded: samples, and their target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.toml_settings import to_plain
from fledge.contracts.train_settings import TrainSettings
from fledge.features import capture_job
from fledge.features.feature_store import FeatureStore
from fledge.features.taps import choose_taps
from fledge.models.head_config import HeadConfig
from fledge.models.resolve import resolve_target, target_name
from fledge.models.target_facts import read_facts
from fledge.models.target_loading import check_supported, load_config
from fledge.models.weights_identity import weights_identity
from fledge.store.corpus import Corpora
from fledge.store.manifest import FEATURES, HEAD, Plan
from fledge.store.vocab_map import VocabMap
from fledge.training.faults import (
    refuse_other_layers,
    refuse_other_target,
    refuse_other_vocabulary,
    refuse_tempered_tops,
)
from fledge.training.head_init import shape_head
from fledge.training.learned_vocabulary import learned_vocabulary
from fledge.training.offline import list_features
from fledge.training.online import list_corpus
from fledge.training.sources import SampleTable, refuse_long_samples
from fledge.training.starting_head import StartingHead, open_starting_head

_OUTSIDE_THE_PLAN = ("parallel", "keep_checkpoints", "keep_readings")
"""Settings that change nothing about the head: a run may go on with others."""


class Drafted(NamedTuple):
    """The target's ids of the tokens that are drafted, ascending, and flags of some of them."""

    ids: NDArray[np.int64]
    common: NDArray[np.bool_] | None = None
    """Those that a CPU drafts, where not all."""

    taught: NDArray[np.bool_] | None = None
    """Those that losses see, where not all."""


@dataclass(frozen=True, slots=True)
class TrainInput:
    """Features or corpora, and the target that they are of."""

    where: str
    """The directory, or the directories, for messages."""

    inside: FeatureStore | Corpora
    samples: SampleTable
    vocab_map: VocabMap
    taps: tuple[int, ...]
    target: str
    """As manifests call it."""

    directory: Path
    """The target's."""

    origin: str
    config: Any
    """The target's text config."""

    identity: dict[str, Any]
    """Of the target: what a head must agree with."""

    device: torch.device
    start: StartingHead | None = None
    """The head whose weights are the first ones; a new head without."""

    @property
    def stored_bytes(self) -> int:
        """Of all files with samples or features."""
        parts = self.inside.parts if isinstance(self.inside, Corpora) else (self.inside,)
        return sum(int(one["bytes"]) for part in parts for one in part.manifest.files.values())

    def head_config(self, settings: TrainSettings) -> HeadConfig:
        if isinstance(self.inside, FeatureStore):
            refuse_other_vocabulary(settings.head.draft_vocab_size, len(self.vocab_map))
        size = min(settings.head.draft_vocab_size or len(self.vocab_map), self.config.vocab_size)
        return shape_head(self.config, settings.head, taps=self.taps, draft_vocab_size=size)

    def choose_drafted(
        self, learned: NDArray[np.int64], settings: TrainSettings, progress: Progress
    ) -> Drafted:
        """The tokens that are drafted; `learned` are positions of samples."""
        wanted = settings.head
        if not wanted.draft_vocab_size:
            return Drafted(self.vocab_map.target_ids)
        assert isinstance(self.inside, Corpora), "`head_config` refuses features"
        facts = read_facts(self.directory)
        found = learned_vocabulary(
            self.inside,
            self.samples,
            learned,
            facts,
            wanted.draft_vocab_size,
            wanted.common_tokens,
            wanted.learned_tokens,
        )
        progress.note(
            f"{len(found.vocab_map):,} tokens are drafted, {found.share:.2%} of what is learned"
        )
        return Drafted(found.vocab_map.target_ids, found.common, found.taught)

    def plan(self, settings: TrainSettings) -> Plan:
        """What the run's directory will hold."""
        plain = to_plain(settings)
        for name in _OUTSIDE_THE_PLAN:
            del plain[name]
        if isinstance(self.inside, Corpora):
            parents = self.inside.parents
        else:
            parents = {FEATURES: self.inside.manifest.fingerprint}
        if self.start is not None:
            parents[HEAD] = self.start.fingerprint
        return Plan(
            kind=HEAD,
            settings=plain,
            parents=parents,
            identity={**self.identity, "taps": list(self.taps)},
        )

    def on(self, device: torch.device) -> "TrainInput":
        return replace(self, device=device)


def open_input(
    *,
    features: str | Path | None,
    corpora: Sequence[Path] = (),
    target: str,
    settings: TrainSettings,
    capture: CaptureSettings,
    is_capture_asked: bool,
    device: torch.device,
    start: Path | None = None,
    needs_weights: bool = True,
    progress: Progress | None = None,
) -> TrainInput:
    """Read what is known of samples and target, and check that they fit.

    `is_capture_asked` says that somebody chose the capture settings, so that features of other
    layers are refused. `start` is a head to go on from. Of several corpora the draft vocabulary is
    that of the first, unless the settings want one of what is learned.
    """
    if (features is None) == (not corpora):
        raise ConfigError(
            "give either --features, which `fledge capture` made, or --corpus, which `fledge "
            "tokenize` made: one of the two."
        )
    if corpora:
        given = _from_corpora(corpora, target, settings, capture, device, needs_weights, progress)
    else:
        assert features is not None
        given = _from_features(
            features, target, capture, is_capture_asked, device, needs_weights, progress
        )
    if isinstance(given.inside, FeatureStore):
        _check_for_features(given.inside, settings)
    refuse_long_samples(given.samples, settings.micro_tokens)
    wanted = given.head_config(settings)
    if start is None:
        return given
    num_layers = int(given.config.num_hidden_layers)
    return replace(given, start=open_starting_head(start, wanted, num_layers=num_layers))


def _check_for_features(store: FeatureStore, settings: TrainSettings) -> None:
    if store.layout.target == "topk":
        refuse_tempered_tops(settings.loss.target_temperature)
    if settings.keep_readings:
        raise ConfigError(
            "train.keep_readings is true, and with --features no target reads anything; set it to "
            "false, or train with --corpus."
        )


def _from_corpora(
    directories: Sequence[Path],
    target: str,
    settings: TrainSettings,
    capture: CaptureSettings,
    device: torch.device,
    needs_weights: bool,
    progress: Progress | None,
) -> TrainInput:
    if capture.layers == "auto":
        raise ConfigError(
            "capture.layers is auto, which is decided by `fledge capture`; name layers, or train "
            "from features."
        )
    opened = [
        capture_job.open_input(
            directory,
            target,
            capture,
            dtype=torch.float32,
            device=device,
            needs_weights=needs_weights,
            progress=progress,
        )
        for directory in directories
    ]
    found, corpora = opened[0], Corpora([one.corpus for one in opened])
    if len(opened) > 1 and progress is not None and not settings.head.draft_vocab_size:
        progress.note(
            f"{len(opened)} corpora; the draft vocabulary is that of the first, {directories[0]}"
        )
    config = found.config.get_text_config()
    return TrainInput(
        where=", ".join(map(str, directories)),
        inside=corpora,
        samples=list_corpus(corpora),
        vocab_map=corpora.vocab_map,
        taps=choose_taps(config, capture.layers),
        target=found.target,
        directory=found.directory,
        origin=found.origin,
        config=config,
        identity=_identity(found.target, found.directory),
        device=device,
    )


def _from_features(
    address: str | Path,
    target: str,
    capture: CaptureSettings,
    is_capture_asked: bool,
    device: torch.device,
    needs_weights: bool,
    progress: Progress | None,
) -> TrainInput:
    store = FeatureStore.open(address)
    resolved = resolve_target(target, progress=progress, needs_weights=needs_weights)
    whole_config = load_config(resolved.directory)
    check_supported(whole_config)
    config = whole_config.get_text_config()
    name = target_name(target)
    identity = _identity(name, resolved.directory)
    refuse_other_target(address, store.identity, target=target, asked=identity)
    if is_capture_asked and capture.layers != "auto":
        refuse_other_layers(address, store.layout.taps, choose_taps(config, capture.layers))
    return TrainInput(
        where=str(address),
        inside=store,
        samples=list_features(store),
        vocab_map=store.vocab_map,
        taps=store.layout.taps,
        target=name,
        directory=resolved.directory,
        origin=resolved.origin,
        config=config,
        identity=identity,
        device=device,
    )


def _identity(name: str, directory: Path) -> dict[str, Any]:
    facts = read_facts(directory)
    return {
        "target": name,
        "weights": weights_identity(directory),
        "tokenizer": facts.tokenizer.identity,
        "vocab_size": facts.vocab_size,
    }
