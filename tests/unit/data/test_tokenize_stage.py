"""The tokenize stage: counts that add up, the same bytes however it is interrupted, refusals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import TokenizeSettings
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import SilentProgress, Task
from fledge.data.loops import MIN_RUN
from fledge.data.tokenize_stage import TokenizeJob, estimate_job, prepare_job, tokenize
from fledge.data.tokenize_tally import MAX_REASONS, TokenizeTally
from fledge.models.tokenizer import TargetTokenizer
from fledge.store.corpus import Corpus
from fledge.store.manifest import Manifest
from fledge.store.stage_directory import open_stage
from tests.unit.data.template_zoo import parse, spell
from tests.unit.data.tokenize_support import (
    answer,
    answered,
    many_rows,
    row,
    save_target,
    special_id,
    write_source,
)

SMALL = TokenizeSettings(max_tokens=200, draft_vocab_size=24, shard_tokens=600, keep_loops=True)
HEAD = "<|im_start|>system\nYou are Eyas.<|im_end|>\n<|im_start|>user\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("targets") / "chatml")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("answers") / "many", many_rows(60))


def run(
    source: Path, target: Path, out: Path, settings: TokenizeSettings = SMALL
) -> tuple[Manifest, Corpus]:
    manifest = tokenize(prepare_job(source, str(target), settings), out)
    return manifest, Corpus.open(out)


def tokenized(
    tmp_path: Path, target: Path, rows: list[Conversation], settings: TokenizeSettings = SMALL
) -> tuple[Manifest, Corpus]:
    return run(write_source(tmp_path / "in", rows), target, tmp_path / "out", settings)


# --- what comes out --------------------------------------------------------------------------


def test_samples_counts_and_vocabulary(source: Path, target: Path, tmp_path: Path) -> None:
    manifest, corpus = run(source, target, tmp_path / "out")
    assert len(corpus) == 60
    assert [sample.row_id for sample in corpus] == [one.id for one in many_rows(60)]
    text = HEAD + "Question 1?<|im_end|>\n<|im_start|>assistant\n⟦Answer 1 la <|im_end|>⟧"
    first = corpus[0]
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == parse("chatml", text)
    assert (first.source, first.message) == ("b", 1)
    counts = manifest.counts
    assert counts["rows"] == {
        "read": 60,
        "used": 60,
        "without_answer": 0,
        "refused": 0,
        "unclear": 0,
        "cut_away": 0,
    }
    masks = [sample.loss_mask for sample in corpus]
    assert counts["samples"] == counts["turns"] == 60
    assert counts["tokens"] == corpus.lengths.sum()
    assert counts["loss_tokens"] == sum(int(mask.sum()) for mask in masks)
    assert counts["loss_share"] == round(counts["loss_tokens"] / counts["tokens"], 6)
    assert counts["lengths"]["max"] == corpus.lengths.max()
    assert counts["lengths"]["p50"] == np.sort(corpus.lengths)[29]
    assert counts["packing"]["sequences"] == len(corpus.packed(200))
    assert {name: one["rows"] for name, one in counts["sources"].items()} == {"a": 30, "b": 30}
    for key in ("samples", "tokens", "loss_tokens"):
        assert sum(one[key] for one in counts["sources"].values()) == counts[key]
    assert all(one["licences"] == ["MIT"] for one in counts["sources"].values())


def test_the_draft_vocabulary_is_counted_on_what_was_said(
    source: Path, target: Path, tmp_path: Path
) -> None:
    settings = replace(SMALL, draft_vocab_size=9)
    manifest, corpus = run(source, target, tmp_path / "out", settings)
    said = np.zeros(512, np.int64)
    by_source: dict[str, list[int]] = {"a": [], "b": []}
    for sample in corpus:
        said += np.bincount(sample.token_ids[sample.loss_mask], minlength=512)
        by_source[sample.source] += sample.token_ids[sample.loss_mask].tolist()
    chosen = corpus.vocab_map.target_ids.tolist()
    assert special_id("<|im_end|>") in chosen
    ranked = sorted(range(512), key=lambda token: (-said[token], token))
    assert chosen == sorted(ranked[:9])
    for name, tokens in by_source.items():
        share = sum(token in chosen for token in tokens) / len(tokens)
        assert manifest.counts["sources"][name]["vocabulary_coverage"] == round(share, 6)
    assert manifest.counts["vocabulary"]["coverage"] < 1


def test_sources_may_count_more_for_the_draft_vocabulary(
    source: Path, target: Path, tmp_path: Path
) -> None:
    settings = replace(SMALL, draft_vocab_size=9, vocabulary_weights={"a": 0, "b": 3})
    manifest, corpus = run(source, target, tmp_path / "out", settings)
    said = np.zeros(512, np.int64)
    for sample in corpus:
        if sample.source == "b":
            said += np.bincount(sample.token_ids[sample.loss_mask], minlength=512)
    said[special_id("<|im_end|>")] = said.max() + 1
    ranked = sorted(range(512), key=lambda token: (-said[token], token))
    assert corpus.vocab_map.target_ids.tolist() == sorted(ranked[:9])
    for name in ("a", "b"):
        assert 0 < manifest.counts["sources"][name]["vocabulary_coverage"] < 1
    settings = replace(SMALL, vocabulary_weights={"c": 2})
    with pytest.raises(ConfigError, match=r"vocabulary_weights names 'c', and the rows are of a, "):
        run(source, target, tmp_path / "other", settings)


def test_a_head_may_draft_the_whole_vocabulary(source: Path, target: Path, tmp_path: Path) -> None:
    settings = replace(SMALL, draft_vocab_size=1000)
    _, corpus = run(source, target, tmp_path / "out", settings)
    assert len(corpus.vocab_map) == 512


def test_the_manifest_names_target_and_tokenizer(
    source: Path, target: Path, tmp_path: Path
) -> None:
    manifest, corpus = run(source, target, tmp_path / "out")
    assert corpus.identity["target"] == "chatml"
    assert corpus.identity["tokenizer"] == TargetTokenizer.load(target).identity
    assert set(corpus.identity["tokenizer"]) == {
        "vocabulary",
        "chat_template",
        "special_tokens",
        "sha256",
    }
    assert corpus.identity["vocab_size"] == 512
    assert corpus.identity["eos_token_ids"] == [special_id("<|im_end|>")]
    assert list(manifest.plan.parents) == ["answers"]
    assert manifest.plan.settings["max_tokens"] == 200


def test_loss_only_where_the_target_spoke(tmp_path: Path, target: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    rows = [row(1, chat, answer(3)), row(2, chat)]
    manifest, corpus = tokenized(tmp_path, target, rows)
    assert [int(sample.loss_mask.sum()) for sample in corpus] == [2]
    assert manifest.counts["rows"]["without_answer"] == 1
    recorded = replace(SMALL, as_recorded=True)
    conversations = write_source(tmp_path / "conversations", rows, "conversations")
    _, corpus = run(conversations, target, tmp_path / "recorded", recorded)
    assert [int(sample.loss_mask.sum()) for sample in corpus] == [4, 4]


def test_sampled_ids_go_through_as_they_are(tmp_path: Path, target: Path) -> None:
    token_ids = spell("chatml", "b<|im_end|>")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    _, corpus = tokenized(tmp_path, target, [row(1, chat, answer(1, "stop", token_ids))])
    assert corpus[0].token_ids[corpus[0].loss_mask].tolist() == token_ids


def test_samples_are_cut_at_the_end(tmp_path: Path, target: Path) -> None:
    rows = [
        answered(1, "q", "short"),
        answered(2, "q", "long " * 60),
        answered(3, "q" * 300, "behind the cut"),
    ]
    manifest, corpus = tokenized(tmp_path, target, rows)
    counts = manifest.counts
    assert corpus.lengths.tolist()[1] == 200
    assert [sample.row_id for sample in corpus] == ["chat/1", "chat/2"]
    assert (counts["samples_cut"], counts["samples_dropped"]) == (2, 1)
    assert (counts["rows"]["used"], counts["rows"]["cut_away"]) == (2, 1)
    assert counts["tokens_cut"] > 100


def test_answers_end_where_they_go_round_in_circles(tmp_path: Path, target: Path) -> None:
    rows = [answered(1, "q", "short"), answered(2, "q", "long " * 60)]
    settings = replace(SMALL, keep_loops=False)
    manifest, corpus = tokenized(tmp_path, target, rows, settings)
    assert manifest.counts["samples_looping"] == 1
    assert manifest.counts["tokens_looping"] > 100
    assert manifest.counts["samples_cut"] == 0
    assert corpus[1].loss_mask.sum() == len("long ") + MIN_RUN


def test_raw_answers_stay_raw(tmp_path: Path, target: Path) -> None:
    rows = [answered(1, "Once", " upon")]
    source = write_source(tmp_path / "raw", rows, settings={"raw": True})
    _, corpus = run(source, target, tmp_path / "out")
    expected = parse("chatml", "Once⟦ upon<|im_end|>⟧")
    assert (corpus[0].token_ids.tolist(), corpus[0].loss_mask.tolist()) == expected


def test_the_day_of_the_answers_is_the_templates_day(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "llama31_tools")
    rows = [answered(1, "q", "a")]
    source = write_source(tmp_path / "in", rows, day=date(2020, 2, 29))
    manifest, corpus = run(source, target, tmp_path / "out")
    text = TargetTokenizer.load(target).decode(corpus[0].token_ids.tolist())
    assert "Today Date: 29 Feb 2020" in text
    assert manifest.plan.settings["day"] == "2020-02-29"


# --- rows that are left out ------------------------------------------------------------------

UNCLEAR = row(
    7,
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ],
    answer(1),
)
REFUSED = row(8, [{"role": "assistant", "content": "Hello!"}], answer(0))
BROKEN = answered(9, "half \ud83e", "a")


def test_rows_left_out_are_counted_with_reasons(tmp_path: Path, target: Path) -> None:
    rows = [*many_rows(5), UNCLEAR, REFUSED, REFUSED, BROKEN, row(10, REFUSED.messages)]
    manifest, corpus = tokenized(tmp_path, target, rows, replace(SMALL, on_unclear="skip"))
    counts = manifest.counts
    assert counts["rows"] == {
        "read": 10,
        "used": 5,
        "without_answer": 1,
        "refused": 3,
        "unclear": 1,
        "cut_away": 0,
    }
    assert counts["reasons"] == {
        "a message holds half of a surrogate pair, which stands for no character": {
            "rows": 1,
            "first_row": "chat/9",
        },
        "the conversation begins with an answer, so nothing was asked": {
            "rows": 2,
            "first_row": "chat/8",
        },
        "the template changes what the target said": {"rows": 1, "first_row": "chat/7"},
    }
    assert len(corpus) == 5


def test_an_unclear_row_is_shown_and_stops_the_run(tmp_path: Path, target: Path) -> None:
    with pytest.raises(MismatchError, match=r"row chat/7 \(row 7 of chat.jsonl\)") as caught:
        tokenized(tmp_path, target, [*many_rows(2), UNCLEAR])
    assert "message 1 says 'easy', and the template renders it as '2<|im_end|>" in str(caught.value)
    assert "go on with --set tokenize.on_unclear=skip" in str(caught.value)


def test_a_run_that_stopped_at_an_unclear_row_goes_on_without_it(
    tmp_path: Path, target: Path
) -> None:
    rows = [*many_rows(40), UNCLEAR, *many_rows(5)]
    source, out = write_source(tmp_path / "in", rows), tmp_path / "out"
    with pytest.raises(MismatchError, match=r"row chat/7 "):
        run(source, target, out)
    skipping = replace(SMALL, on_unclear="skip")
    went_on, _ = run(source, target, out, skipping)
    assert went_on.plan.settings["on_unclear"] == "skip"
    assert went_on.fingerprint == run(source, target, tmp_path / "new", skipping)[0].fingerprint


def test_other_settings_are_welcome_where_nothing_was_made(tmp_path: Path, target: Path) -> None:
    source, out = write_source(tmp_path / "in", [*many_rows(2), UNCLEAR]), tmp_path / "out"
    with pytest.raises(MismatchError, match=r"row chat/7 "):
        run(source, target, out)
    settings = replace(SMALL, on_unclear="skip", max_tokens=300)
    assert run(source, target, out, settings)[0].counts["samples"] == 2


def test_a_refused_row_stops_the_run_if_asked(tmp_path: Path, target: Path) -> None:
    with pytest.raises(MismatchError, match="row chat/8 .*begins with an answer"):
        tokenized(tmp_path, target, [*many_rows(2), REFUSED], replace(SMALL, on_refused="stop"))


def test_nothing_left_is_an_error(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ArtifactError, match="none of the 2 rows .*sample: 2 because the conversat"):
        tokenized(tmp_path, target, [REFUSED, REFUSED])
    silent = row(4, [{"role": "user", "content": "Hi"}])
    settings = replace(SMALL, max_tokens=16)
    with pytest.raises(
        ArtifactError,
        match="1 because the target said nothing in them; 3 because what it said begins behind "
        r"tokenize.max_tokens = 16\.",
    ):
        run(
            write_source(tmp_path / "late", [silent, *many_rows(3)]),
            target,
            tmp_path / "late-out",
            settings,
        )


def test_endless_reasons_are_gathered() -> None:
    tally = TokenizeTally()
    for number in range(MAX_REASONS + 5):
        tally.count_reason(f"reason {number} " + "x" * 200, f"r/{number}")
    assert len(tally.reasons) == MAX_REASONS + 1
    assert tally.reasons["other reasons"] == {"rows": 5, "first_row": f"r/{MAX_REASONS}"}
    assert all(len(reason) <= 160 for reason in tally.reasons)


# --- interruptions ---------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class FallingProgress(SilentProgress):
    """Fails when the work under `label` has advanced so many times."""

    def __init__(self, label: str, after: int) -> None:
        self._label = label
        self._left = after

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        with super().task(label, total, unit) as silent:
            yield self if label == self._label else silent

    def advance(self, amount: int) -> None:
        del amount
        self._left -= 1
        if self._left < 0:
            raise Interrupted

    def update_total(self, total: int) -> None:
        del total


@pytest.fixture(scope="module")
def large_job(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TokenizeJob, Manifest]:
    """A job of many shards, and what an unbroken run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    rows = [*many_rows(400), REFUSED, UNCLEAR, *many_rows(200)]
    source = write_source(folder / "in", rows)
    settings = replace(SMALL, on_unclear="skip", shard_tokens=2000)
    job = prepare_job(source, str(target), settings)
    return job, tokenize(job, folder / "unbroken")


def test_the_same_rows_give_the_same_bytes(
    large_job: tuple[TokenizeJob, Manifest], tmp_path: Path
) -> None:
    job, unbroken = large_job
    again = tokenize(job, tmp_path / "again")
    assert again.files == unbroken.files
    assert again.fingerprint == unbroken.fingerprint
    assert len(again.files) > 10


@pytest.mark.parametrize(
    ("label", "after"), [("tokenizing", 0), ("tokenizing", 2), ("counting tokens", 3)]
)
def test_an_interrupted_run_goes_on(
    large_job: tuple[TokenizeJob, Manifest], tmp_path: Path, label: str, after: int
) -> None:
    job, unbroken = large_job
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        tokenize(job, out, FallingProgress(label, after))
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    (out / f".shard-{len(written):05d}.safetensors.tmp").write_bytes(b"half a shard")
    (out / ".shard-99999.safetensors.tmp").write_bytes(b"half a shard")
    assert tokenize(job, out).fingerprint == unbroken.fingerprint
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    assert written.items() <= kept.items()
    assert not list(out.glob(".shard*"))
    finished = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    tokenize(job, out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == finished


@pytest.mark.slow
def test_killed_at_any_moment(
    large_job: tuple[TokenizeJob, Manifest], target: Path, tmp_path: Path
) -> None:
    """A real process and a real kill -9, somewhere in the middle."""
    job, unbroken = large_job
    out = tmp_path / "out"
    assignments = [
        f"--set=tokenize.{k}={v}"
        for k, v in job.plan.settings.items()
        if k in ("max_tokens", "draft_vocab_size", "shard_tokens", "on_unclear")
    ]
    command = [sys.executable, "-m", "fledge", "tokenize", str(job.source), "--out", str(out)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [*command, "--target", str(target), *assignments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    wanted = random.Random(time.time_ns()).randint(1, len(unbroken.files) - 2)
    while len(list(out.glob("shard-*"))) < wanted and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tokenize(job, out).fingerprint == unbroken.fingerprint


def test_two_writers_are_refused(source: Path, target: Path, tmp_path: Path) -> None:
    job = prepare_job(source, str(target), SMALL)
    with (
        open_stage(tmp_path / "out", job.plan),
        pytest.raises(ArtifactError, match="another fledge process is writing"),
    ):
        tokenize(job, tmp_path / "out")


def test_other_settings_need_another_directory(source: Path, target: Path, tmp_path: Path) -> None:
    run(source, target, tmp_path / "out")
    with pytest.raises(
        MismatchError, match=r"settings.max_tokens = 200, and this run has .* = 100"
    ):
        run(source, target, tmp_path / "out", replace(SMALL, max_tokens=100))


# --- input and target that do not fit --------------------------------------------------------


def test_inputs_that_cannot_be_read(tmp_path: Path, target: Path) -> None:
    rows = many_rows(2)
    conversations = write_source(tmp_path / "conversations", rows, "conversations")
    with pytest.raises(MismatchError, match="holds conversations as they were recorded"):
        prepare_job(conversations, str(target), SMALL)
    corpus = write_source(tmp_path / "corpus", rows, "corpus")
    with pytest.raises(MismatchError, match="holds corpus, not answers; give a directory"):
        prepare_job(corpus, str(target), SMALL)
    with pytest.raises(ConfigError, match="is a file; give a directory that `fledge regenerate`"):
        prepare_job(corpus / "manifest.json", str(target), SMALL)
    with pytest.raises(ArtifactError, match="there is no directory"):
        prepare_job(tmp_path / "nowhere", str(target), SMALL)
    short = write_source(tmp_path / "short", rows)
    (short / "rows-00000.jsonl").write_text("")
    with pytest.raises(ArtifactError, match="is 0 bytes long, and the manifest says"):
        prepare_job(short, str(target), SMALL)


def test_answers_of_another_tokenizer_are_refused(tmp_path: Path, target: Path) -> None:
    other = TargetTokenizer.load(save_target(tmp_path / "other", "zephyr"))
    identity = {"model": "zephyr", "tokenizer": other.identity}
    source = write_source(tmp_path / "in", many_rows(2), identity=identity)
    with pytest.raises(MismatchError, match="was answered by zephyr with tokenizer .*vocabulary"):
        prepare_job(source, str(target), SMALL)
    job = prepare_job(source, str(tmp_path / "other"), SMALL)
    assert (job.plan.identity["target"], job.plan.identity["answered_by"]) == ("other", "zephyr")


def test_answers_in_a_chat_need_a_template(tmp_path: Path, target: Path) -> None:
    bare = save_target(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    chat = write_source(tmp_path / "chat", many_rows(2), identity={"model": "served"})
    with pytest.raises(
        MismatchError, match=r"by served in a chat, and .*bare has no chat template; give the"
    ):
        prepare_job(chat, str(bare), SMALL)
    raw = write_source(tmp_path / "raw", many_rows(2), settings={"raw": True})
    recorded = write_source(tmp_path / "recorded", many_rows(2), "conversations")
    assert prepare_job(raw, str(bare), SMALL).plan.identity["answered_by"] is None
    assert len(run(raw, target, tmp_path / "a")[1]) == 2
    assert len(run(recorded, bare, tmp_path / "b", replace(SMALL, as_recorded=True))[1]) == 2


def test_a_tokenizer_larger_than_the_target_is_refused(tmp_path: Path, source: Path) -> None:
    small = save_target(tmp_path / "small", vocab_size=100)
    with pytest.raises(MismatchError, match="has token id 258, and the target's vocab_size is 100"):
        prepare_job(source, str(small), SMALL)


def test_a_config_without_a_vocabulary_is_refused(tmp_path: Path, source: Path) -> None:
    broken = save_target(tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": None}))
    with pytest.raises(ArtifactError, match=r"config.json"):
        prepare_job(source, str(broken), SMALL)


def test_the_estimate_is_near(large_job: tuple[TokenizeJob, Manifest], tmp_path: Path) -> None:
    job, unbroken = large_job
    estimate = estimate_job(job, SilentProgress())
    assert estimate.rows == 602
    assert estimate.tokens == pytest.approx(unbroken.counts["tokens"], rel=0.05)
    stored = sum(entry["bytes"] for entry in unbroken.files.values())
    assert 0.5 * stored < estimate.stored_bytes < 2 * stored
