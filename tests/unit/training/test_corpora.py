"""Several corpora are learned from as if they were one, with the first one's draft vocabulary."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fledge.contracts.errors import ConfigError, MismatchError
from fledge.store.corpus import Corpora, Corpus, corpus_fingerprints
from fledge.store.corpus_shard import Sample
from fledge.store.manifest import read_manifest
from fledge.store.vocab_map import VOCAB_MAP_NAME, VocabMap
from fledge.testing import save_tiny_target
from fledge.training.train_plan import plan_training
from tests.unit.features.capture_support import VOCAB_SIZE, random_samples, save_corpus
from tests.unit.training.train_support import LENGTHS, SHORT, losses, opened, run

MORE = [
    sample._replace(row_id=f"more/{number}", source="more")
    for number, sample in enumerate(random_samples([50, 35, 70, 45, 60], seed=1))
]


@pytest.fixture(scope="module")
def more_corpus(folder: Path, tiny_target: Path) -> Path:
    return save_corpus(folder / "more", tiny_target, MORE)


def test_two_corpora_train_as_one_with_all_samples(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, more_corpus: Path
) -> None:
    whole = save_corpus(tmp_path / "whole", tiny_target, [*random_samples(LENGTHS), *MORE])
    settings = replace(SHORT, sources=("random", "more*3"))
    both = run(
        tiny_target,
        tmp_path / "both",
        replace(settings, keep_readings=True),
        corpus=tiny_corpus,
        beside=[more_corpus],
    )
    run(tiny_target, tmp_path / "one", settings, corpus=whole)
    assert losses(tmp_path / "both") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    held_out = (losses(tmp_path / name, "held_out") for name in ("both", "one"))
    assert next(held_out) == pytest.approx(next(held_out), rel=1e-5)
    made = [read_manifest(path).fingerprint for path in (tiny_corpus, more_corpus)]
    assert both.plan.parents == {"corpus": made[0], "corpus 2": made[1]}
    assert corpus_fingerprints({**both.plan.parents, "head": "x"}) == made
    with pytest.raises(MismatchError, match="corpus 2"):
        run(tiny_target, tmp_path / "both", settings, corpus=tiny_corpus)
    with pytest.raises(MismatchError, match="corpus"):
        run(tiny_target, tmp_path / "both", settings, corpus=more_corpus, beside=[tiny_corpus])


def test_samples_are_counted_through(
    tiny_target: Path, tiny_corpus: Path, more_corpus: Path
) -> None:
    parts = [Corpus.open(path) for path in (tiny_corpus, more_corpus)]
    both = Corpora(parts)
    assert len(both) == len(LENGTHS) + len(MORE)
    assert same(both[len(LENGTHS) + 2], MORE[2])
    assert [sample.row_id for sample in both][-5:] == [sample.row_id for sample in MORE]
    given = opened(tiny_target, corpus=tiny_corpus, beside=[more_corpus])
    planned = plan_training(given, SHORT, itemsize=4)
    assert planned.samples + planned.samples_held_out == len(both)
    files = [entry for part in parts for entry in part.manifest.files.values()]
    assert planned.read_bytes == sum(entry["bytes"] for entry in files)


def same(ours: Sample, theirs: Sample) -> bool:
    is_equal = [np.array_equal(ours[place], theirs[place]) for place in (0, 1)]
    return all(is_equal) and ours[2:] == theirs[2:]


def test_the_first_one_has_the_draft_vocabulary(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    other = save_corpus(tmp_path / "other", tiny_target, MORE)
    VocabMap(np.arange(1, VOCAB_SIZE, 2), VOCAB_SIZE).save(other / VOCAB_MAP_NAME)
    first = opened(tiny_target, corpus=tiny_corpus, beside=[other]).vocab_map
    assert np.array_equal(first.target_ids, Corpus.open(tiny_corpus).vocab_map.target_ids)
    turned = opened(tiny_target, corpus=other, beside=[tiny_corpus]).vocab_map
    assert np.array_equal(turned.target_ids, np.arange(1, VOCAB_SIZE, 2))


def test_a_corpus_is_given_once(tiny_target: Path, tiny_corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"hold the same corpus; give it once, and name in train"):
        opened(tiny_target, corpus=tiny_corpus, beside=[tiny_corpus])


def test_each_must_be_of_the_target(tmp_path: Path, tiny_target: Path, tiny_corpus: Path) -> None:
    renamed = save_corpus(tmp_path / "renamed", tiny_target, MORE, target="large")
    with pytest.raises(MismatchError, match=r"renamed .* target = 'large', and .* = 'tiny'"):
        opened(tiny_target, corpus=tiny_corpus, beside=[renamed])
    silent = save_tiny_target(tmp_path / "tiny", has_chat_template=False)
    foreign = save_corpus(tmp_path / "foreign", silent, MORE)
    with pytest.raises(MismatchError, match=r"foreign .* tokenizer \w{12}, and tiny has tokenizer"):
        opened(tiny_target, corpus=tiny_corpus, beside=[foreign])
