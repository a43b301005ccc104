"""What a capture leaves on disk is what transformers' own forward says of the same text.

Catches: layers off by one, a sample that sees its neighbour in the pass, rows cut at the wrong
place, labels of another row, a distribution over another vocabulary, and any of it only in packed
passes.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fledge.contracts.capture_settings import CaptureSettings
from fledge.features.capture_layout import final_codec, taps_codec
from fledge.features.feature_store import FeatureStore
from fledge.features.label_rows import label_rows
from fledge.ops.feature_codec import Codec
from fledge.store.corpus import Corpus
from fledge.store.corpus_shard import Sample
from fledge.store.feature_layout import EncodedSample
from fledge.testing import save_tiny_target
from tests.unit.features.capture_support import random_samples, run_capture, save_corpus

ARCHITECTURES = ["llama", "mistral-sliding", "gemma2-hybrid", "gemma3-hybrid", "olmo3-hybrid"]
TAPS = (1, 3, 0)
LENGTHS = (30, 2, 50, 9, 120, 70, 3, 44)
EXACT = CaptureSettings(
    layers=TAPS,
    features="exact",
    target="hidden",
    target_features="exact",
    pass_tokens=96,
    shard_tokens=200,
)


class Truth:
    """What transformers says of one sample, read alone by the model's own attention."""

    def __init__(self, model: Any, sample: Sample, taps: tuple[int, ...]) -> None:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            output = model(ids, use_cache=False, output_hidden_states=True)
        self.features_TF = torch.cat([output.hidden_states[tap][0] for tap in taps], dim=-1)
        self.rows_R = label_rows(sample.loss_mask)
        self.final_RD = output.hidden_states[-1][0][self.rows_R]
        self.logits_RV = output.logits[0][self.rows_R].float()


@cache
def model_of(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()


def decoded(codec: Codec | None, sample: EncodedSample, prefix: str) -> Tensor:
    assert codec is not None
    parts = {}
    for name, (dtype, _) in codec.parts.items():
        array = torch.from_numpy(sample.rows[f"{prefix}.{name}"].copy())
        parts[name] = array.view(dtype) if dtype is torch.bfloat16 else array
    return codec.decode(parts, torch.float32)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def made(tmp_path: Path, architecture: str) -> tuple[Path, Path]:
    target = save_tiny_target(tmp_path / "target", architecture)
    return target, save_corpus(tmp_path / "corpus", target, random_samples(LENGTHS))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_features_equal_the_hidden_states_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    target, corpus = made(tmp_path, architecture)
    run_capture(corpus, target, tmp_path / "features", EXACT)
    store = FeatureStore.open(tmp_path / "features")
    draft_ids = store.vocab_map.target_ids
    assert len(store) == 7
    for place in range(len(store)):
        sample = store.read(place)
        truth = Truth(model_of(target, torch.float32), Corpus.open(corpus)[sample.number], TAPS)
        features = decoded(taps_codec(store.layout, store.channels), sample, "taps")
        assert len(features) == len(sample.token_ids) - 2
        assert relative(features, truth.features_TF[: len(features)]) < 1e-5
        assert relative(decoded(final_codec(store.layout), sample, "final"), truth.final_RD) < 1e-5
        assert sample.rows["greedy"].tolist() == truth.logits_RV.argmax(-1).tolist()
        mass = truth.logits_RV.softmax(-1)[:, draft_ids].sum(-1).log()
        np.testing.assert_allclose(sample.rows["log_mass"], mass, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_in_bfloat16_features_are_as_near_the_truth_as_transformers(
    architecture: str, tmp_path: Path
) -> None:
    target, corpus = made(tmp_path, architecture)
    run_capture(corpus, target, tmp_path / "features", EXACT, dtype=torch.bfloat16)
    store = FeatureStore.open(tmp_path / "features")
    ours, theirs, exact = [], [], []
    for place in range(len(store)):
        sample = store.read(place)
        text = Corpus.open(corpus)[sample.number]
        ours.append(decoded(taps_codec(store.layout, store.channels), sample, "taps"))
        for found, dtype in ((theirs, torch.bfloat16), (exact, torch.float32)):
            truth = Truth(model_of(target, dtype), text, TAPS)
            found.append(truth.features_TF[: len(ours[-1])])
    truth_all = torch.cat(exact)
    assert relative(torch.cat(ours), truth_all) < 1.25 * relative(torch.cat(theirs), truth_all)


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "olmo3-hybrid"])
def test_packed_equals_unpacked(architecture: str, tmp_path: Path) -> None:
    target, corpus = made(tmp_path, architecture)
    for name, pass_tokens in (("alone", 1), ("together", 1 << 20)):
        run_capture(corpus, target, tmp_path / name, replace(EXACT, pass_tokens=pass_tokens))
    alone, together = (FeatureStore.open(tmp_path / name) for name in ("alone", "together"))
    assert alone.numbers.tolist() == together.numbers.tolist()
    for place in range(len(alone)):
        one, other = alone.read(place).rows, together.read(place).rows
        assert one["greedy"].tolist() == other["greedy"].tolist()
        for name in ("taps.values", "final.values", "log_mass"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_coded_and_most_probable_tokens(tmp_path: Path) -> None:
    target, corpus = made(tmp_path, "llama")
    settings = replace(EXACT, features="q8", target="topk", top_k=20)
    run_capture(corpus, target, tmp_path / "features", settings)
    store = FeatureStore.open(tmp_path / "features")
    model = model_of(target, torch.float32)
    for place in range(len(store)):
        sample = store.read(place)
        truth = Truth(model, Corpus.open(corpus)[sample.number], TAPS)
        features = decoded(taps_codec(store.layout, store.channels), sample, "taps")
        assert relative(features, truth.features_TF[: len(features)]) < 0.02
        logprobs = truth.logits_RV[:, store.vocab_map.target_ids].log_softmax(-1)
        best = logprobs.topk(20, dim=-1)
        np.testing.assert_allclose(sample.rows["top.logprobs"], best.values, rtol=2e-3, atol=2e-3)
        # Tokens that are equally probable may change places.
        named = logprobs.gather(1, torch.from_numpy(sample.rows["top.ids"].astype(np.int64)))
        np.testing.assert_allclose(named, best.values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_smollm2_for_real(tmp_path: Path) -> None:
    from fledge.features.capture import capture
    from fledge.features.capture_job import open_input
    from fledge.models.resolve import resolve_target

    directory = resolve_target("smollm2-135m-instruct").directory
    samples = [
        Sample(sample.token_ids * 100, sample.loss_mask, sample.row_id, sample.source, 1)
        for sample in random_samples((40, 25, 300, 120))
    ]
    corpus = save_corpus(tmp_path / "corpus", directory, samples, target="smollm2-135m-instruct")
    settings = replace(EXACT, layers="default", pass_tokens=256)
    given = open_input(
        corpus,
        "smollm2-135m-instruct",
        settings,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    capture(given, tmp_path / "features")
    store = FeatureStore.open(tmp_path / "features")
    assert store.layout.taps == (2, 15, 27)
    model = model_of(directory, torch.float32)
    for place in range(len(store)):
        sample = store.read(place)
        truth = Truth(model, Corpus.open(corpus)[sample.number], store.layout.taps)
        features = decoded(taps_codec(store.layout, store.channels), sample, "taps")
        assert relative(features, truth.features_TF[: len(features)]) < 1e-5
        assert relative(decoded(final_codec(store.layout), sample, "final"), truth.final_RD) < 1e-5
        assert sample.rows["greedy"].tolist() == truth.logits_RV.argmax(-1).tolist()
