"""Inputs and targets that do not fit are refused before anything is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.data.tokenize_stage import prepare_job
from fledge.models.tokenizer import TargetTokenizer
from tests.unit.data.tokenize_support import (
    SMALL,
    many_rows,
    run,
    save_target,
    write_source,
)


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
