"""The stage behind `fledge tokenize`: answers and a target's tokenizer in, a corpus out.

Rows are taken in order. A shard ends behind the row that fills it and says how many rows were used
up, so that a killed run goes on behind its last shard, and ends with the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import count
from pathlib import Path

import numpy as np

from fledge.contracts.data_settings import TokenizeSettings
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import Progress, SilentProgress, Task
from fledge.contracts.toml_settings import to_plain
from fledge.data.regenerate.input_rows import InputRows
from fledge.data.tokenize_report import summarise
from fledge.data.tokenize_rows import RowTokenizer, TokenizedRow
from fledge.data.tokenize_tally import TokenizeTally
from fledge.models.chat_spans import TurnFinder
from fledge.models.resolve import resolve_target
from fledge.models.target_facts import TargetFacts, read_facts
from fledge.store.capacity import require_disk, translated_disk_errors
from fledge.store.corpus import CORPUS
from fledge.store.corpus_shard import (
    SHARD_PATTERN,
    Sample,
    Shard,
    shard_file,
    token_dtype,
    write_shard,
)
from fledge.store.manifest import Manifest, Plan, read_manifest
from fledge.store.stage_directory import StageDirectory, open_stage
from fledge.store.vocab_map import VOCAB_MAP_NAME

ANSWERS, CONVERSATIONS = "answers", "conversations"

_ROWS_AT_ONCE = 256
_PROBED_ROWS = 256
_SHARD_BYTES_PER_SAMPLE = 64
_DAY_FORMAT = "%Y-%m-%d"


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """Everything a run needs to know before it starts."""

    source: Path
    settings: TokenizeSettings
    facts: TargetFacts
    plan: Plan
    is_raw: bool
    """The answers continue prompts as they stand, without the chat template."""

    def row_tokenizer(self) -> RowTokenizer:
        tokenizer = self.facts.tokenizer
        finder = TurnFinder(tokenizer, self.facts.eos_token_ids, is_raw=self.is_raw)
        return RowTokenizer(tokenizer, finder, self.settings)


def prepare_job(
    source: Path, target: str, settings: TokenizeSettings, progress: Progress | None = None
) -> TokenizeJob:
    """Read what is known of the input and the target, and check that they fit."""
    parent = read_source(source, settings)
    resolved = resolve_target(target, progress=progress, needs_weights=False)
    facts = read_facts(resolved.directory)
    _check_tokenizer(source, parent, target, facts)
    day = _day_of(parent) if facts.tokenizer.asks_the_date else None
    if day is not None:
        facts = replace(facts, tokenizer=facts.tokenizer.on_day(day))
    plan = Plan(
        kind=CORPUS,
        settings={**to_plain(settings), "day": day and day.isoformat()},
        parents={parent.plan.kind: parent.fingerprint},
        identity={
            "target": Path(target).name if Path(target).exists() else target,
            "tokenizer": facts.tokenizer.identity,
            "vocab_size": facts.vocab_size,
            "eos_token_ids": sorted(facts.eos_token_ids),
        },
    )
    return TokenizeJob(source, settings, facts, plan, bool(parent.plan.settings.get("raw")))


def tokenize(job: TokenizeJob, out: Path, progress: Progress | None = None) -> Manifest:
    """Make the corpus; goes on where an earlier run of the same job stopped."""
    shown = progress or SilentProgress()
    with open_stage(out, job.plan) as stage:
        if not stage.is_finished:
            with translated_disk_errors(out, place="output"), InputRows(job.source, shown) as rows:
                require_disk(out, estimate(job, rows).stored_bytes, "the corpus", place="output")
                tally = _write_shards(job, stage, rows, shown)
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
    with InputRows(job.source, progress) as rows:
        return estimate(job, rows)


def read_source(source: Path, settings: TokenizeSettings) -> Manifest:
    """The manifest of the input, which must be of a kind that can be tokenized."""
    if source.is_file():
        raise ConfigError(
            f"{source} is a file; tokenize reads a directory of answers, which `fledge regenerate` "
            "makes."
        )
    manifest = read_manifest(source)
    kind = manifest.plan.kind
    if kind == CONVERSATIONS and not settings.as_recorded:
        raise MismatchError(
            f"{source} holds conversations as they were recorded, not answers of the target. Run "
            "`fledge regenerate` on it first, or take the recorded answers with --as-recorded."
        )
    if kind not in (ANSWERS, CONVERSATIONS):
        raise MismatchError(f"{source} holds {kind}; tokenize reads {ANSWERS}.")
    for name, entry in manifest.files.items():
        path = source / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise ArtifactError(
                f"{path} is missing or not {entry['bytes']} bytes long, as the manifest says; make "
                f"{source} again."
            )
    return manifest


def _check_tokenizer(source: Path, parent: Manifest, target: str, facts: TargetFacts) -> None:
    """Sampled token ids mean something to one tokenizer only."""
    asked = parent.plan.identity.get("tokenizer")
    ours = facts.tokenizer.identity
    if asked is not None and asked["sha256"] != ours["sha256"]:
        different = [name for name, value in asked.items() if ours.get(name) != value]
        raise MismatchError(
            f"{source} was answered by {parent.plan.identity.get('model')} with tokenizer "
            f"{asked['sha256'][:12]}, and {target} has tokenizer {ours['sha256'][:12]}, another "
            f"one in {', '.join(different)}; give the target that answered."
        )


def _day_of(parent: Manifest) -> date | None:
    """The day on which the answers were made, for templates that write the date."""
    text = str(parent.provenance.get("date", ""))[:10]
    try:
        return datetime.strptime(text, _DAY_FORMAT).date()
    except ValueError:
        return None


def _write_shards(
    job: TokenizeJob, stage: StageDirectory, rows: InputRows, progress: Progress
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
        for made in _tokenized(job, rows, total.rows, task):
            open_shard.add(made)
            if open_shard.num_tokens >= job.settings.shard_tokens:
                total.add(open_shard.tally)
                open_shard.write(shard_file(stage.path, next(numbers)), job, total.rows)
                open_shard = _OpenShard()
    total.add(open_shard.tally)
    if open_shard.samples:
        open_shard.write(shard_file(stage.path, next(numbers)), job, total.rows)
    return total


def _tokenized(job: TokenizeJob, rows: InputRows, first: int, task: Task) -> Iterator[TokenizedRow]:
    row_tokenizer = job.row_tokenizer()
    for start in range(first, len(rows), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, len(rows))
        yield from row_tokenizer.tokenize([rows[number] for number in range(start, stop)])
        task.advance(stop - start)


class _OpenShard:
    """Samples that wait for their shard to be full."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_tokens = 0
        self.tally = TokenizeTally()

    def add(self, made: TokenizedRow) -> None:
        self.tally.add(made.tally)
        for one in made.samples:
            self.num_tokens += len(one.token_ids)
            self.samples.append(
                Sample(
                    token_ids=np.array(one.token_ids, np.uint32),
                    loss_mask=np.array(one.loss_mask, np.bool_),
                    row_id=made.row.id,
                    source=made.row.origin.source,
                    message=one.message,
                )
            )

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
        worst = max(tally.reasons.items(), key=lambda item: int(item[1]["rows"]), default=None)
        why = f"; {worst[1]['rows']:,} of them because {worst[0]}" if worst else ""
        raise ArtifactError(f"none of the {tally.rows:,} rows of {job.source} gave a sample{why}.")
    found = stage.path.glob(SHARD_PATTERN)
    paths = sorted(found, key=lambda path: (len(path.name), path.name))
    vocab_map, counts = summarise(
        [Shard(path) for path in paths], tally, job.settings, job.facts, progress
    )
    vocab_map.save(stage.path / VOCAB_MAP_NAME)
    for leftover in stage.path.glob(f".{SHARD_PATTERN}.tmp"):
        leftover.unlink()
    stage.finish(counts=counts, files=[*paths, stage.path / VOCAB_MAP_NAME], progress=progress)
