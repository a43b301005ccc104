"""The tokenize stage: what comes out of answers, counts that add up, rows that are left out."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.data import tokenize_workers
from fledge.data.loops import MIN_RUN
from fledge.data.tokenize_tally import MAX_REASONS, TokenizeTally
from fledge.models.tokenizer import TargetTokenizer
from tests.unit.data.template_zoo import parse, spell
from tests.unit.data.tokenize_support import (
    REFUSED,
    SMALL,
    UNCLEAR,
    answer,
    answered,
    many_rows,
    row,
    run,
    save_target,
    special_id,
    tokenized,
    write_source,
)

HEAD = "<|im_start|>system\nYou are Eyas.<|im_end|>\n<|im_start|>user\n"
BROKEN = answered(9, "half \ud83e", "a")


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


# --- processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "seconds", "expected"),
    [(1, 900, 1), (2, 900, 1), (4, 900, 3), (64, 900, 8), (64, 5, 1)],
)
def test_other_processes_only_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, cores: int, seconds: float, expected: int
) -> None:
    monkeypatch.setattr(tokenize_workers, "num_cores", lambda: cores)
    assert tokenize_workers.choose_workers(seconds) == expected
