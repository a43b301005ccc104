"""What is known of a corpus once all its shards are there: lengths, sources, draft vocabulary."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.data.tokenize_tally import TokenizeTally
from fledge.models.target_facts import TargetFacts
from fledge.store.corpus_shard import Shard
from fledge.store.packing import pack
from fledge.store.vocab_map import VocabMap, choose_vocabulary

_PERCENTILES = (5, 50, 90, 95, 99)


class _SourceCounts:
    """Of one source: samples, tokens, and how often each token has loss."""

    def __init__(self, vocab_size: int) -> None:
        self.samples = 0
        self.tokens = 0
        self.said: NDArray[np.int64] = np.zeros(vocab_size, np.int64)


def summarise(
    shards: Sequence[Shard],
    tally: TokenizeTally,
    settings: TokenizeSettings,
    facts: TargetFacts,
    progress: Progress,
) -> tuple[VocabMap, dict[str, Any]]:
    """The draft vocabulary, and the counts of the manifest."""
    by_source = _count(shards, facts.vocab_size, progress)
    said = np.sum([one.said for one in by_source.values()], axis=0)
    size = min(settings.draft_vocab_size, facts.vocab_size)
    weighed = _weigh(by_source, settings.vocabulary_weights)
    vocab_map = choose_vocabulary(weighed, size, {*facts.eos_token_ids, *tally.end_ids})
    lengths = np.concatenate([np.diff(shard.offsets) for shard in shards])
    plan = pack(lengths, settings.max_tokens)
    tokens, loss_tokens = int(lengths.sum()), int(said.sum())
    return vocab_map, {
        "rows": {
            "read": tally.rows,
            "used": tally.used,
            "without_answer": tally.without_answer,
            "refused": tally.refused,
            "unclear": tally.unclear,
            "cut_away": tally.cut_away,
        },
        "reasons": dict(sorted(tally.reasons.items())),
        "turns": tally.turns,
        "samples": len(lengths),
        "samples_cut": tally.samples_cut,
        "samples_dropped": tally.samples_dropped,
        "tokens": tokens,
        "tokens_cut": tally.tokens_cut,
        "samples_looping": tally.samples_looping,
        "tokens_looping": tally.tokens_looping,
        "loss_tokens": loss_tokens,
        "loss_share": round(loss_tokens / tokens, 6),
        "lengths": _lengths(lengths),
        "packing": {
            "length": plan.length,
            "sequences": len(plan),
            "fill": round(plan.fill, 6),
        },
        "vocabulary": {
            "size": len(vocab_map),
            "distinct_said": int(np.count_nonzero(said)),
            "coverage": round(vocab_map.coverage(said), 6),
        },
        "sources": {
            name: {
                "licences": tally.licences[name],
                "rows": tally.source_rows[name],
                "samples": one.samples,
                "tokens": one.tokens,
                "loss_tokens": int(one.said.sum()),
                "vocabulary_coverage": round(vocab_map.coverage(one.said), 6),
            }
            for name, one in sorted(by_source.items())
        },
    }


def _weigh(by_source: Mapping[str, _SourceCounts], weights: Mapping[str, int]) -> NDArray[np.int64]:
    """How often tokens were said, those of some sources counted several times."""
    for name in weights:
        if name not in by_source:
            raise ConfigError(
                f"tokenize.vocabulary_weights names {name!r}, and the rows are of "
                f"{', '.join(sorted(by_source))}."
            )
    parts = [weights.get(name, 1) * one.said for name, one in by_source.items()]
    total: NDArray[np.int64] = np.sum(parts, axis=0)
    return total


def _count(
    shards: Sequence[Shard], vocab_size: int, progress: Progress
) -> dict[str, _SourceCounts]:
    found: dict[str, _SourceCounts] = {}
    with progress.task("counting tokens", sum(len(shard) for shard in shards), "samples") as task:
        for shard in shards:
            lengths = np.diff(shard.offsets)
            source_of_token = np.repeat(shard.source_ids, lengths)
            for number, name in enumerate(shard.note.sources):
                counts = found.setdefault(name, _SourceCounts(vocab_size))
                is_own = shard.source_ids == number
                has_loss = (source_of_token == number) & (shard.loss_mask == 1)
                counts.samples += int(is_own.sum())
                counts.tokens += int(lengths[is_own].sum())
                counts.said += np.bincount(shard.token_ids[has_loss], minlength=vocab_size)
            task.advance(len(shard))
    return found


def _lengths(lengths: NDArray[np.int64]) -> dict[str, int | float]:
    """Tokens of a sample: the value that so many percent of the samples do not exceed."""
    values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf")
    named = {f"p{percent}": int(value) for percent, value in zip(_PERCENTILES, values, strict=True)}
    return {**named, "max": int(lengths.max()), "mean": round(float(lengths.mean()), 3)}
