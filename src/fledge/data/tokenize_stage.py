"""The stage behind `fledge tokenize`: answers and a target's tokenizer in, a corpus out.

Rows are taken in order. A shard ends behind the row that fills it and says how many rows were used
up, so that a killed run goes on behind its last shard, and ends with the same bytes.
"""

from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import count
from pathlib import Path

import numpy as np

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.contracts.toml_settings import to_plain
from fledge.data.card_parts import add_corpus
from fledge.data.input_rows import InputRows
from fledge.data.tokenize_report import summarise
from fledge.data.tokenize_rows import RowTokenizer, TokenizedRow
from fledge.data.tokenize_source import read_source
from fledge.data.tokenize_tally import TokenizeTally
from fledge.data.tokenize_workers import TokenizerChoice, choose_workers, tokenize_batches
from fledge.models.resolve import resolve_target, target_name
from fledge.models.target_facts import TargetFacts, read_facts
from fledge.store.capacity import require_disk, translated_disk_errors
from fledge.store.corpus_shard import (
    SHARD_PATTERN,
    Sample,
    Shard,
    shard_file,
    token_dtype,
    write_shard,
)
from fledge.store.manifest import ANSWERS, CORPUS, Manifest, Plan
from fledge.store.stage_directory import StageDirectory, open_stage
from fledge.store.vocab_map import VOCAB_MAP_NAME

_PROBED_ROWS = 256
_SHARD_BYTES_PER_SAMPLE = 64
_DAY_FORMAT = "%Y-%m-%d"


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """Everything a run needs to know before it starts."""

    source: Path
    parent: Manifest
    """Of the input."""

    settings: TokenizeSettings
    facts: TargetFacts
    plan: Plan
    directory: Path
    """Of the target."""

    day: date | None
    """When the answers were made, for templates that write the date."""

    def tokenizer_choice(self) -> TokenizerChoice:
        return TokenizerChoice(
            directory=self.directory,
            day=self.day,
            settings=self.settings,
            is_raw=_is_raw(self.parent),
        )

    def row_tokenizer(self) -> RowTokenizer:
        return self.tokenizer_choice().row_tokenizer(self.facts)

    def rows(self, progress: Progress) -> InputRows:
        return InputRows(self.source, self.parent, progress)


def prepare_job(
    source: Path, target: str, settings: TokenizeSettings, progress: Progress | None = None
) -> TokenizeJob:
    """Read what is known of the input and the target, and check that they fit."""
    parent = read_source(source, settings)
    resolved = resolve_target(target, progress=progress, needs_weights=False)
    facts = read_facts(resolved.directory)
    _check_target(source, parent, target, facts)
    day = _day_of(parent) if facts.tokenizer.asks_the_date else None
    if day is not None:
        facts = replace(facts, tokenizer=facts.tokenizer.on_day(day))
    plan = Plan(
        kind=CORPUS,
        settings={**to_plain(settings), "day": day and day.isoformat()},
        parents={parent.plan.kind: parent.fingerprint},
        identity={
            "target": target_name(target),
            "answered_by": parent.plan.identity.get("model"),
            "tokenizer": facts.tokenizer.identity,
            "vocab_size": facts.vocab_size,
            "eos_token_ids": sorted(facts.eos_token_ids),
        },
    )
    return TokenizeJob(source, parent, settings, facts, plan, resolved.directory, day)


def tokenize(
    job: TokenizeJob,
    out: Path,
    progress: Progress | None = None,
    *,
    num_workers: int | None = None,
) -> Manifest:
    """Make the corpus; goes on where an earlier run of the same job stopped.

    `num_workers` processes tokenize, by default several where there is enough to do; the result is
    the same with any number.
    """
    shown = progress or SilentProgress()
    with open_stage(out, job.plan, has_results=_has_shards) as stage:
        if not stage.is_finished:
            with translated_disk_errors(out, place="output"), job.rows(shown) as rows:
                likely = estimate(job, rows)
                require_disk(out, likely.stored_bytes, "the corpus", place="output")
                workers = num_workers or choose_workers(likely.seconds)
                tally = _write_shards(job, stage, rows, shown, workers)
                _finish(job, stage, tally, shown)
        return stage.manifest


@dataclass(frozen=True, slots=True)
class TokenizeEstimate:
    """What a run will make of its rows, judged by the first of them."""

    rows: int
    source_bytes: int
    tokens: int
    samples: int
    stored_bytes: int
    memory_bytes: int
    seconds: float


def estimate(job: TokenizeJob, rows: InputRows) -> TokenizeEstimate:
    """Tokenize a few rows and multiply; rows that cannot be used stop nothing here."""
    lenient = replace(job.settings, on_refused="skip", on_unclear="skip")
    num_probed = min(len(rows), _PROBED_ROWS)
    started = datetime.now()
    made = (
        replace(job, settings=lenient)
        .row_tokenizer()
        .tokenize([rows[number] for number in range(num_probed)])
    )
    factor = len(rows) / num_probed if num_probed else 0.0
    samples = [sample for one in made for sample in one.samples]
    tokens = sum(len(sample.token_ids) for sample in samples)
    item_bytes = np.dtype(token_dtype(job.facts.vocab_size)).itemsize + 1
    stored = tokens * item_bytes + len(samples) * _SHARD_BYTES_PER_SAMPLE
    shard = job.settings.shard_tokens
    return TokenizeEstimate(
        rows=len(rows),
        source_bytes=rows.num_bytes,
        tokens=round(tokens * factor),
        samples=round(len(samples) * factor),
        stored_bytes=round(stored * factor) + 9 * job.facts.vocab_size,
        memory_bytes=shard * item_bytes * 4,
        seconds=(datetime.now() - started).total_seconds() * factor,
    )


def estimate_job(job: TokenizeJob, progress: Progress) -> TokenizeEstimate:
    """What `tokenize` would read and write; writes nothing."""
    with job.rows(progress) as rows:
        return estimate(job, rows)


def _has_shards(out: Path) -> bool:
    return shard_file(out, 0).exists()


def _is_raw(parent: Manifest) -> bool:
    """Whether the answers continue prompts as they stand, without a chat template."""
    return bool(parent.plan.settings.get("raw"))


def _check_target(source: Path, parent: Manifest, target: str, facts: TargetFacts) -> None:
    """Sampled token ids mean something to one tokenizer only, answers in a chat to a template."""
    model = parent.plan.identity.get("model")
    asked = parent.plan.identity.get("tokenizer")
    ours = facts.tokenizer.identity
    if asked is not None and asked["sha256"] != ours["sha256"]:
        parts = [name for name in asked if name != "sha256" and ours.get(name) != asked[name]]
        raise MismatchError(
            f"{source} was answered by {model} with tokenizer {asked['sha256'][:12]}, and {target} "
            f"has tokenizer {ours['sha256'][:12]}, another one in {', '.join(parts)}; give the "
            "target that answered."
        )
    is_chat = parent.plan.kind == ANSWERS and not _is_raw(parent)
    if is_chat and not facts.tokenizer.has_chat_template:
        raise MismatchError(
            f"{source} was answered by {model} in a chat, and {target} has no chat template; give "
            "the target that answered, or answer again with --set regenerate.raw=true."
        )


def _day_of(parent: Manifest) -> date | None:
    """The day on which the answers were made, for templates that write the date."""
    text = str(parent.provenance.get("date", ""))[:10]
    try:
        return datetime.strptime(text, _DAY_FORMAT).date()
    except ValueError:
        return None


def _write_shards(
    job: TokenizeJob, stage: StageDirectory, rows: InputRows, progress: Progress, num_workers: int
) -> TokenizeTally:
    """All shards that are not there yet; returns the counts of all rows."""
    total = TokenizeTally()
    number = 0
    while (path := shard_file(stage.path, number)).exists():
        total.add(TokenizeTally.from_json(Shard(path).note.tally))
        number += 1
    if total.rows:
        progress.note(f"{total.rows:,} of {len(rows):,} rows were tokenized before.")
    with progress.task("tokenizing", len(rows) - total.rows, "rows") as task:
        numbers = count(number)
        open_shard = _OpenShard()
        left = (rows[row] for row in range(total.rows, len(rows)))
        for batch in tokenize_batches(left, job.tokenizer_choice(), job.facts, num_workers):
            for made in batch:
                open_shard.add(made)
                if open_shard.num_tokens >= job.settings.shard_tokens:
                    total.add(open_shard.tally)
                    open_shard.write(shard_file(stage.path, next(numbers)), job, total.rows)
                    open_shard = _OpenShard()
            task.advance(len(batch))
    total.add(open_shard.tally)
    if open_shard.samples:
        open_shard.write(shard_file(stage.path, next(numbers)), job, total.rows)
    return total


class _OpenShard:
    """Samples that wait for their shard to be full."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_tokens = 0
        self.tally = TokenizeTally()

    def add(self, made: TokenizedRow) -> None:
        self.tally.add(made.tally)
        self.num_tokens += sum(len(one.token_ids) for one in made.samples)
        self.samples += made.samples

    def write(self, path: Path, job: TokenizeJob, next_row: int) -> None:
        write_shard(
            path,
            self.samples,
            dtype=token_dtype(job.facts.vocab_size),
            next_row=next_row,
            tally=self.tally.to_json(),
        )


def _finish(
    job: TokenizeJob, stage: StageDirectory, tally: TokenizeTally, progress: Progress
) -> None:
    if not tally.samples:
        raise ArtifactError(
            f"none of the {tally.rows:,} rows of {job.source} gave a sample"
            f"{_losses(tally, job.settings.max_tokens)}."
        )
    found = stage.path.glob(SHARD_PATTERN)
    paths = sorted(found, key=lambda path: (len(path.name), path.name))
    vocab_map, counts = summarise(
        [Shard(path) for path in paths], tally, job.settings, job.facts, progress
    )
    vocab_map.save(stage.path / VOCAB_MAP_NAME)
    for leftover in stage.path.glob(f".{SHARD_PATTERN}.tmp"):
        leftover.unlink()
    identity = job.plan.identity
    figures = {key: identity[key] for key in ("target", "answered_by")}
    card = add_corpus(job.source, stage.path, {**figures, "settings": job.plan.settings, **counts})
    files = [*paths, stage.path / VOCAB_MAP_NAME, *card]
    stage.finish(counts=counts, files=files, progress=progress)


def _losses(tally: TokenizeTally, max_tokens: int) -> str:
    """Where the rows went, for the error that none are left."""
    losses = {reason: int(entry["rows"]) for reason, entry in tally.reasons.items()}
    losses["the target said nothing in them"] = tally.without_answer
    losses[f"what it said begins behind tokenize.max_tokens = {max_tokens}"] = tally.cut_away
    parts = [f"{rows:,} because {reason}" for reason, rows in losses.items() if rows]
    return f": {'; '.join(parts)}" if parts else ""
