"""Layers by themselves: the probe finds the layer that knows, and leaves the default where nothing
is better; a capture uses what it finds and does not look twice.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.features.probe_rows import MAX_ROWS, ProbeRows, read_probe_rows
from fledge.features.sample_rows import count_rows
from fledge.features.tap_choice import recorded_taps
from fledge.features.tap_probe import candidate_taps, compare_taps, probe_taps
from fledge.models.target_reading import Readout
from fledge.store.corpus import Corpus
from fledge.store.corpus_shard import Sample
from fledge.testing import save_tiny_target, target_of, tiny_model, tiny_tokenizer
from tests.unit.features.capture_support import run_capture, save_corpus

NUM_LAYERS = 8
FULL, WINDOW = "full_attention", "sliding_attention"


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def invented_rows(known_at: int | None, *, num_rows: int = 1000) -> tuple[ProbeRows, Readout]:
    """Final states are made of one layer and the embedding, or of nothing that is seen."""
    chance = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance)

    layers = {layer: numbers(num_rows, 16) for layer in range(NUM_LAYERS + 1)}
    embedding, readout = numbers(num_rows, 16), Readout(numbers(40, 16))
    source = numbers(num_rows, 16) if known_at is None else layers[known_at] @ numbers(16, 16)
    final = source + embedding
    is_judged = torch.arange(num_rows) % 3 == 0
    return ProbeRows(layers, embedding, final, readout.logits(final).argmax(1), is_judged), readout


def config_of(num_layers: int, types: list[str] | None = None) -> Any:
    return SimpleNamespace(num_hidden_layers=num_layers, layer_types=types)


@pytest.mark.parametrize("known_at", [1, 7])
def test_the_layer_that_knows_is_found(known_at: int) -> None:
    rows, readout = invented_rows(known_at)
    candidates = [(2, 4, 5), (1, 2, 3), (2, 3, 4), (4, 5, 7), (2, 6, 8)]
    probe = compare_taps(rows, readout, candidates)
    assert known_at in probe.chosen
    assert probe.scores[0].taps == probe.chosen
    assert probe.scores[0].accuracy > 0.9
    assert probe.scores[0].lead > 0.5
    assert all(score.accuracy < 0.4 for score in probe.scores[1:])
    assert (probe.num_fitted, probe.num_judged) == (666, 334)
    text = "\n".join(probe.lines())
    assert "2, 4, 5 (d)" in text
    assert f"chosen: {', '.join(map(str, probe.chosen))};" in text
    assert json.loads(json.dumps(probe.to_json()))["default"] == [2, 4, 5]


def test_the_default_stays_where_nothing_is_better() -> None:
    rows, readout = invented_rows(None)
    probe = compare_taps(rows, readout, candidate_taps(config_of(NUM_LAYERS)))
    assert probe.chosen == probe.default == (2, 4, 5)
    assert "that did worse" in "\n".join(probe.lines())


def test_the_same_rows_give_the_same_table() -> None:
    rows, readout = invented_rows(5)
    candidates = candidate_taps(config_of(NUM_LAYERS))
    assert compare_taps(rows, readout, candidates) == compare_taps(rows, readout, candidates)


def test_too_few_rows_are_refused() -> None:
    rows, readout = invented_rows(5, num_rows=120)
    with pytest.raises(
        ConfigError,
        match=r'"auto" fits 100 labels and judges 50 of other samples at least, and'
        r' found 80 and 40 in the corpus; use "default"',
    ):
        compare_taps(rows, readout, [(2, 4, 5)])


@pytest.mark.parametrize(
    ("num_layers", "types", "default", "layers", "count"),
    [
        (30, None, (2, 15, 27), {2, 4, 8, 12, 15, 17, 21, 25, 27, 30}, 36),
        (4, None, (2, 2, 1), {1, 2, 3, 4}, 5),
        (2, None, (2, 1, 0), {0, 1, 2}, 1),
        (18, ([WINDOW] * 5 + [FULL]) * 3, (6, 12, 18), {2, 5, 6, 7, 9, 10, 12, 15, 18}, 36),
        (32, ([WINDOW] * 3 + [FULL]) * 8, (4, 16, 28), {2, 4, 8, 12, 16, 20, 24, 28, 29, 32}, 37),
    ],
)
def test_candidates(
    num_layers: int, types: list[str] | None, default: tuple[int, ...], layers: set[int], count: int
) -> None:
    candidates = candidate_taps(config_of(num_layers, types))
    assert candidates[0] == default
    assert {layer for taps in candidates for layer in taps} == layers
    assert len(candidates) == len(set(candidates)) == count


def themed_samples(count: int) -> Iterator[Sample]:
    """Each sample has six tokens of its own that it repeats in random order."""
    random = np.random.default_rng(0)
    for number in range(count):
        theme = random.choice(np.arange(6, 262), 6, replace=False)
        tokens = random.choice(theme, 40).astype(np.uint16)
        yield Sample(tokens, np.arange(40) >= 8, f"row-{number}", "themes", 1)


def forgetful_model(knowing_layer: int) -> Any:
    """Only one layer looks at other tokens, at all of them alike; the others pass on what they
    read. So only from there on does the residual stream know a sample's theme.
    """
    model = tiny_model(
        num_hidden_layers=NUM_LAYERS, vocab_size=len(tiny_tokenizer()), max_position_embeddings=64
    )
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers, start=1):
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.o_proj.weight.mul_(4.0 if number == knowing_layer else 0.0)
    return model


@pytest.fixture(scope="module")
def themed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that knows only in its last layer, and a corpus for it."""
    place = tmp_path_factory.mktemp("themes")
    directory = save_tiny_target(place / "target", num_hidden_layers=NUM_LAYERS)
    forgetful_model(NUM_LAYERS).save_pretrained(directory)
    return directory, save_corpus(place / "corpus", directory, list(themed_samples(40)))


def test_a_target_that_knows_in_its_last_layer(themed: tuple[Path, Path]) -> None:
    corpus = Corpus.open(themed[1])
    target = target_of(forgetful_model(NUM_LAYERS))
    probe = probe_taps(corpus, count_rows(corpus), target, pass_tokens=256)
    assert probe.default == (2, 4, 5)
    assert NUM_LAYERS in probe.chosen
    knowing = [score.accuracy for score in probe.scores if NUM_LAYERS in score.taps]
    ignorant = [score.accuracy for score in probe.scores if NUM_LAYERS not in score.taps]
    assert min(knowing) > max(ignorant) + 0.03


def test_rows_are_what_a_head_would_see(themed: tuple[Path, Path]) -> None:
    """Against one sample read alone, and whatever the passes."""
    corpus = Corpus.open(themed[1])
    target, counted = target_of(forgetful_model(3)), count_rows(corpus)

    def read(pass_tokens: int) -> ProbeRows:
        return read_probe_rows(
            corpus, counted, target, (1, 8), pass_tokens=pass_tokens, progress=SilentProgress()
        )

    rows, again = read(100), read(4096)
    assert len(rows.greedy_R) == 40 * 32 <= MAX_ROWS
    torch.testing.assert_close(rows.layers[8], again.layers[8], rtol=1e-4, atol=1e-4)
    assert rows.greedy_R.tolist() == again.greedy_R.tolist()
    # Samples are fitted or judged as a whole.
    assert rows.is_judged_R.view(40, 32).sum(1).tolist() == [0, 32, 0, 32, 0] * 8

    tokens = torch.from_numpy(corpus[1].token_ids.astype(np.int64))
    greedy = target.logits_by_transformers(tokens).argmax(-1)
    assert rows.greedy_R[32:64].tolist() == greedy[7:39].tolist()
    torch.testing.assert_close(rows.embedding_RD[32:64], target.embedding(tokens[7:39]))
    # No layer before the third looks beyond its own token.
    torch.testing.assert_close(rows.layers[1][32:64], target.embedding(tokens[6:38]))


def test_a_capture_shows_the_table_and_looks_once(
    themed: tuple[Path, Path], tmp_path: Path
) -> None:
    target, corpus = themed
    settings = CaptureSettings(layers="auto", pass_tokens=256, shard_tokens=500)
    shown = Notes()
    manifest = run_capture(corpus, target, tmp_path, settings, progress=shown)
    taps = manifest.plan.identity["features"]["taps"]
    assert NUM_LAYERS in taps
    assert any("lead over the default" in note for note in shown.notes)
    assert recorded_taps(tmp_path) == tuple(taps)

    for name in ("manifest.json", "index.safetensors", "shard-00001.safetensors"):
        (tmp_path / name).unlink(missing_ok=True)
    assert recorded_taps(tmp_path) == tuple(taps)
    shown = Notes()
    again = run_capture(corpus, target, tmp_path, settings, progress=shown)
    assert again.fingerprint == manifest.fingerprint
    assert not any("lead over the default" in note for note in shown.notes)
    assert recorded_taps(tmp_path / "nothing") is None
