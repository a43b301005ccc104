"""A draft vocabulary of what is learned.

Catches: counts that do not know how often a source is learned, counts of what is held out or left
out, of prompts, or of the first of several corpora only, and a head with other tokens than were
counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.train_settings import TrainSettings
from fledge.models.head_files import load_head
from fledge.store.corpus import Corpus
from fledge.store.corpus_shard import Sample
from fledge.testing import EOS_TOKEN_ID
from fledge.training.assembly import make_order
from fledge.training.stage import train
from fledge.training.train_input import TrainInput, open_input
from tests.unit.features.capture_support import VOCAB_SIZE, random_samples, save_corpus
from tests.unit.training.train_support import CPU, SHORT, Notes, opened, run, with_held_out

PROMPT = (250, 251, 252)


def saying(tokens: Sequence[int], *, row: str, source: str = "first") -> Sample:
    """A prompt that counts for nothing, and an answer of these tokens."""
    token_ids = np.array([*PROMPT, *tokens], np.uint16)
    loss_mask = np.arange(len(token_ids)) >= len(PROMPT)
    return Sample(token_ids, loss_mask, row, source, 1)


def wanting(size: int, settings: TrainSettings = SHORT, **changes: Any) -> TrainSettings:
    return replace(settings, head=replace(settings.head, draft_vocab_size=size), **changes)


def chosen(given: TrainInput, settings: TrainSettings) -> list[int]:
    learned = make_order(given, settings)[0].trained
    found: list[int] = given.choose_drafted(learned, settings, Notes()).ids.tolist()
    return found


def test_a_source_counts_as_often_as_it_is_learned(tmp_path: Path, tiny_target: Path) -> None:
    often = [saying([50] * 4, row=f"often-{number}", source="often") for number in range(6)]
    rare = [saying([40] * 2, row=f"rare-{number}", source="rare") for number in range(6)]
    corpus = save_corpus(tmp_path / "corpus", tiny_target, [*often, *rare])
    all_of_it = with_held_out(SHORT, share=0)
    given = opened(tiny_target, corpus=corpus, settings=all_of_it)
    for sources, token in (
        ((), 50),
        (("often", "rare"), 50),
        (("often", "rare*3"), 40),
        (("rare",), 40),
        (("often",), 50),
    ):
        settings = wanting(2, all_of_it, sources=sources)
        assert chosen(given, settings) == [EOS_TOKEN_ID, token], sources


def test_what_is_not_learned_is_not_counted(tmp_path: Path, tiny_target: Path) -> None:
    """Each sample says a token of its own, so that the vocabulary tells which were counted."""
    samples = [saying([100 + number] * 5, row=f"row-{number}") for number in range(24)]
    given = opened(tiny_target, corpus=save_corpus(tmp_path / "corpus", tiny_target, samples))
    for share in (1.0, 0.5):
        settings = replace(with_held_out(SHORT, share=0.3), share=share)
        learned = make_order(given, settings)[0].trained
        assert 0 < len(learned) < 24
        numbers = given.samples.numbers[learned].tolist()
        wanted = wanting(len(numbers) + 1, settings)
        assert chosen(given, wanted) == [EOS_TOKEN_ID, *(100 + number for number in numbers)]


def test_all_corpora_count_together(tmp_path: Path, tiny_target: Path) -> None:
    first = [saying([50] * 5 + [40] * 3, row=f"first-{number}") for number in range(4)]
    second = [saying([40] * 3 + [60] * 4, row=f"more-{number}", source="b") for number in range(4)]
    places = [
        save_corpus(tmp_path / name, tiny_target, samples)
        for name, samples in (("first", first), ("second", second))
    ]
    settings = wanting(2, with_held_out(SHORT, share=0))
    both = opened(tiny_target, corpus=places[0], beside=places[1:], settings=settings)
    assert chosen(both, settings) == [EOS_TOKEN_ID, 40]
    alone = opened(tiny_target, corpus=places[0], settings=settings)
    assert chosen(alone, settings) == [EOS_TOKEN_ID, 50]


@pytest.mark.parametrize("size", [0, 20])
def test_whose_vocabulary_it_is_is_said(
    size: int, tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    more = [saying([50] * 5, row=f"more-{number}") for number in range(4)]
    notes = Notes()
    open_input(
        features=None,
        corpora=[tiny_corpus, save_corpus(tmp_path / "more", tiny_target, more)],
        target=str(tiny_target),
        settings=wanting(size),
        capture=CaptureSettings(),
        is_capture_asked=False,
        device=CPU,
        progress=notes,
    )
    said = f"2 corpora; the draft vocabulary is that of the first, {tiny_corpus}"
    assert (said in notes.lines) == (size == 0)


def test_the_end_of_an_answer_is_always_in(tiny_target: Path, tiny_corpus: Path) -> None:
    """Random samples never say it."""
    assert all(EOS_TOKEN_ID not in sample.token_ids for sample in Corpus.open(tiny_corpus))
    given = opened(tiny_target, corpus=tiny_corpus)
    assert chosen(given, wanting(1)) == [EOS_TOKEN_ID]
    assert EOS_TOKEN_ID in chosen(given, wanting(30))


def test_a_vocabulary_ends_with_the_targets(tiny_target: Path, tiny_corpus: Path) -> None:
    settings = wanting(VOCAB_SIZE + 1)
    given = opened(tiny_target, corpus=tiny_corpus, settings=settings)
    assert chosen(given, settings) == list(range(VOCAB_SIZE))
    assert given.head_config(settings).draft_vocab_size == VOCAB_SIZE


def test_the_head_of_a_run_drafts_these_tokens(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    more = [
        sample._replace(row_id=f"more/{number}", source="more")
        for number, sample in enumerate(random_samples([50, 35, 70], seed=1))
    ]
    beside = [save_corpus(tmp_path / "more", tiny_target, more)]
    settings = wanting(20, replace(SHORT, max_steps=2, sources=("random", "more*3")))
    notes = Notes()
    run(
        tiny_target,
        tmp_path / "run",
        settings,
        corpus=tiny_corpus,
        beside=beside,
        progress=notes,
    )
    head = load_head(tmp_path / "run")
    given = opened(tiny_target, corpus=tiny_corpus, beside=beside, settings=settings)
    assert head.config.draft_vocab_size == 20
    assert head.draft_to_target_V.tolist() == chosen(given, settings)

    samples = [*Corpus.open(tiny_corpus), *Corpus.open(beside[0])]
    counts: Counter[int] = Counter()
    for position in make_order(given, settings)[0].trained:
        sample = samples[given.samples.numbers[position]]
        counts.update(sample.token_ids[np.asarray(sample.loss_mask, bool)].tolist())
    kept = sum(counts[token] for token in head.draft_to_target_V.tolist())
    assert kept == sum(number for _, number in counts.most_common(19)), "and the end of answers"
    share = kept / counts.total()
    assert f"20 tokens are drafted, {share:.2%} of what is learned" in notes.lines


def test_features_have_a_vocabulary_already(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    refused = r"draft_vocab_size is 40, and features are those of a draft vocabulary of 131 tokens"
    with pytest.raises(ConfigError, match=refused):
        opened(tiny_target, features=tiny_features, settings=wanting(40))
    # A trial of a sweep has other settings than those that the features were opened with.
    given = opened(tiny_target, features=tiny_features)
    with pytest.raises(ConfigError, match=refused):
        train(given, wanting(40), tmp_path / "run")
