"""What a capture is asked for, checked before anything runs: a corpus, and the target it is for."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.contracts.progress import Progress
from fledge.contracts.toml_settings import to_plain
from fledge.features.capture_layout import make_layout
from fledge.features.capture_order import ShardPlan, order_shards
from fledge.features.capture_plan import CapturePlan, CorpusFacts, TargetSizes, plan_capture
from fledge.features.sample_rows import SampleRows, count_rows
from fledge.features.taps import choose_taps
from fledge.models.parameter_count import count_parameters
from fledge.models.resolve import resolve_target, target_name
from fledge.models.target_facts import TargetFacts, read_facts
from fledge.models.target_loading import check_supported, load_config
from fledge.models.weights_identity import weights_identity
from fledge.store.corpus import Corpus
from fledge.store.feature_layout import FeatureLayout
from fledge.store.manifest import FEATURES, Plan

_PROBED_TAPS = 3
"""As many layers as `auto` looks for."""

_HELD_SHARDS = 6
"""In memory at once: one that fills, those that wait, those that are being written."""


@dataclass(frozen=True, slots=True)
class CaptureInput:
    """A corpus and a target that fit each other."""

    corpus: Corpus
    rows: SampleRows
    target: str
    """As manifests call it."""

    directory: Path
    """The target's."""

    origin: str
    facts: TargetFacts
    config: Any
    sizes: TargetSizes
    settings: CaptureSettings
    dtype: torch.dtype
    device: torch.device

    @property
    def corpus_facts(self) -> CorpusFacts:
        rows = self.rows
        return CorpusFacts(
            num_samples=len(rows.kept),
            num_unlabelled=len(rows.kept) - len(rows.used),
            num_tokens=int(self.corpus.lengths.sum()),
            kept_tokens=rows.num_tokens,
            read_tokens=rows.num_tokens - len(rows.used),
            feature_rows=rows.num_features,
            label_rows=rows.num_labels,
        )

    def layout(self, taps: tuple[int, ...]) -> FeatureLayout:
        return make_layout(self.settings, taps, self.sizes, self.dtype)

    def shards(self, layout: FeatureLayout) -> tuple[ShardPlan, ...]:
        return order_shards(
            self.rows,
            layout,
            pass_tokens=self.settings.pass_tokens,
            shard_tokens=self.settings.shard_tokens,
        )

    def plan(self, layout: FeatureLayout) -> Plan:
        """What the directory will hold."""
        return Plan(
            kind=FEATURES,
            settings=to_plain(self.settings),
            parents={"corpus": self.corpus.manifest.fingerprint},
            identity={
                "target": self.target,
                "weights": weights_identity(self.directory),
                "tokenizer": self.facts.tokenizer.identity,
                "vocab_size": self.facts.vocab_size,
                "eos_token_ids": sorted(self.facts.eos_token_ids),
                "features": layout.to_json(),
            },
        )


def open_input(
    corpus_directory: Path,
    target: str,
    settings: CaptureSettings,
    *,
    dtype: torch.dtype,
    device: torch.device,
    needs_weights: bool = True,
    progress: Progress | None = None,
) -> CaptureInput:
    """Read what is known of the corpus and the target, and check that they fit."""
    corpus = Corpus.open(corpus_directory)
    resolved = resolve_target(target, progress=progress, needs_weights=needs_weights)
    config, facts = load_config(resolved.directory), read_facts(resolved.directory)
    check_supported(config)
    given = CaptureInput(
        corpus=corpus,
        rows=count_rows(corpus),
        target=target_name(target),
        directory=resolved.directory,
        origin=resolved.origin,
        facts=facts,
        config=config,
        sizes=_sizes(config, facts, corpus, dtype),
        settings=settings,
        dtype=dtype,
        device=device,
    )
    _check_target(given)
    _check_samples(given)
    if settings.layers != "auto":
        choose_taps(config.get_text_config(), settings.layers)
    return given


def _sizes(config: Any, facts: TargetFacts, corpus: Corpus, dtype: torch.dtype) -> TargetSizes:
    text_config, count = config.get_text_config(), count_parameters(config)
    return TargetSizes(
        hidden_size=text_config.hidden_size,
        intermediate_size=getattr(text_config, "intermediate_size", None) or 0,
        vocab_size=facts.vocab_size,
        draft_vocab_size=len(corpus.vocab_map),
        itemsize=dtype.itemsize,
        num_parameters=count.total,
        num_active_parameters=count.active,
    )


def estimate(given: CaptureInput, flops_per_s: float | None = None) -> CapturePlan:
    """What the capture would write, need and take; loads no weights."""
    settings = given.settings
    if settings.layers == "auto":
        taps = tuple(range(_PROBED_TAPS))  # which ones makes no difference here
    else:
        taps = choose_taps(given.config.get_text_config(), settings.layers)
    plan = plan_capture(
        given.corpus_facts, given.sizes, settings, num_taps=len(taps), flops_per_s=flops_per_s
    )
    num_shards = len(given.shards(given.layout(taps)))
    host_bytes = min(num_shards, _HELD_SHARDS) * plan.total_bytes // num_shards
    return replace(plan, num_shards=num_shards, host_bytes=host_bytes)


def _check_target(given: CaptureInput) -> None:
    """Token ids mean something to one tokenizer only, and answers are one target's own."""
    directory, identity = given.corpus.directory, given.corpus.identity
    theirs, ours = identity["tokenizer"], given.facts.tokenizer.identity
    if theirs["sha256"] != ours["sha256"]:
        parts = [name for name in ours if name != "sha256" and theirs.get(name) != ours[name]]
        raise MismatchError(
            f"{directory} was tokenized for {identity['target']} with tokenizer "
            f"{theirs['sha256'][:12]}, and {given.target} has tokenizer {ours['sha256'][:12]}, "
            f"another one in {', '.join(parts)}; give the target of the corpus."
        )
    for name, there, asked in (
        ("target", identity["target"], given.target),
        ("vocab_size", identity["vocab_size"], given.facts.vocab_size),
    ):
        if there != asked:
            raise MismatchError(
                f"{directory} was tokenized for a target with {name} = {there!r}, and this one has "
                f"{name} = {asked!r}; give the target of the corpus, or tokenize for this one."
            )


def _check_samples(given: CaptureInput) -> None:
    directory, rows = given.corpus.directory, given.rows
    if not len(rows.used):
        raise ArtifactError(
            f"none of the {len(rows.kept):,} samples of {directory} has a token with loss behind "
            "its first two; there is nothing to learn from."
        )
    longest = int(rows.kept.argmax())
    context_len = given.config.get_text_config().max_position_embeddings
    if rows.kept[longest] - 1 > context_len:
        raise MismatchError(
            f"sample {longest} of {directory} has {rows.kept[longest] - 1:,} tokens to read, and "
            f"{given.target} reads {context_len:,} at most; tokenize with tokenize.max_tokens = "
            f"{context_len}."
        )
