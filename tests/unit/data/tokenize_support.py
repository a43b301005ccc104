"""Directories for the tokenize stage: small targets without weights, answers, conversations."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Answer, Conversation, Message, Origin
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.data.tokenize_stage import prepare_job, tokenize
from fledge.store.corpus import Corpus
from fledge.store.manifest import MANIFEST_NAME, Manifest, Plan, read_manifest
from fledge.store.rows import rows_file, write_rows
from fledge.store.stage_directory import open_stage
from tests.unit.data.template_zoo import end_ids, fast_tokenizer, vocabulary

USER, ASSISTANT = "user", "assistant"
SMALL = TokenizeSettings(max_tokens=200, draft_vocab_size=24, shard_tokens=600, keep_loops=True)


def save_target(directory: Path, name: str = "chatml", *, vocab_size: int = 512) -> Path:
    """A target's config and tokenizer; no stage that only tokenizes needs more."""
    fast_tokenizer(name).save_pretrained(directory)
    config = {"model_type": "llama", "vocab_size": vocab_size}
    (directory / "config.json").write_text(json.dumps(config))
    ends = {"eos_token_id": sorted(end_ids(name))}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory


def row(
    number: int, messages: Sequence[Message], *answers: Answer, source: str = "chat"
) -> Conversation:
    origin = Origin(source=source, licence="MIT", file=f"{source}.jsonl", row=number)
    return Conversation(
        id=f"{source}/{number}", messages=tuple(messages), origin=origin, answers=answers
    )


def answer(message: int, finish: Any = "stop", token_ids: Sequence[int] | None = None) -> Answer:
    return Answer(
        message=message,
        model="m",
        temperature=0.7,
        seed=1,
        finish_reason=finish,
        token_ids=None if token_ids is None else tuple(token_ids),
    )


def answered(number: int, prompt: str, text: str, source: str = "chat") -> Conversation:
    messages = [{"role": USER, "content": prompt}, {"role": ASSISTANT, "content": text}]
    return row(number, messages, answer(1), source=source)


def many_rows(num_rows: int) -> list[Conversation]:
    """Short conversations of two sources, all different."""
    return [
        answered(n, f"Question {n}?", f"Answer {n} " + "la " * (n % 7), "abc"[n % 2])
        for n in range(1, num_rows + 1)
    ]


def write_source(
    directory: Path,
    rows: Sequence[Conversation],
    kind: str = "answers",
    *,
    day: date | None = None,
    settings: dict[str, Any] | None = None,
    identity: dict[str, Any] | None = None,
) -> Path:
    """A finished directory of rows."""
    plan = Plan(kind=kind, settings=settings or {}, identity=identity or {})
    with open_stage(directory, plan) as stage:
        write_rows(rows_file(directory, 0), rows)
        stage.finish(counts={"rows": len(rows)}, files=[rows_file(directory, 0)])
    if day is not None:
        _set_day(directory, day)
    return directory


def _set_day(directory: Path, day: date) -> None:
    """Provenance is outside the fingerprint, so a manifest stays whole."""
    path = directory / MANIFEST_NAME
    table = json.loads(path.read_text())
    table["provenance"]["date"] = f"{day.isoformat()} 10:00 UTC"
    path.write_text(json.dumps(table))
    read_manifest(directory)


def special_id(token: str, name: str = "chatml") -> int:
    return vocabulary(name)[token]


def run(
    source: Path, target: Path, out: Path, settings: TokenizeSettings = SMALL
) -> tuple[Manifest, Corpus]:
    manifest = tokenize(prepare_job(source, str(target), settings), out)
    return manifest, Corpus.open(out)


def tokenized(
    tmp_path: Path, target: Path, rows: list[Conversation], settings: TokenizeSettings = SMALL
) -> tuple[Manifest, Corpus]:
    return run(write_source(tmp_path / "in", rows), target, tmp_path / "out", settings)


UNCLEAR = row(
    7,
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ],
    answer(1),
)
REFUSED = row(8, [{"role": "assistant", "content": "Hello!"}], answer(0))
