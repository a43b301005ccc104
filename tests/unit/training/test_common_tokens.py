"""Drafted tokens that are common: what a CPU drafts of a large vocabulary.

Catches: rows that no longer belong to their tokens, a GPU that is left with a part, flags that are
lost in a file, tokens that are called common without being said most often, and tokens that no loss
is to see and that change what is learned, or are not drafted.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge import Engine, SamplingParams
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.contracts.head_settings import HeadSettings
from fledge.interop.export import export_head
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head, save_head
from fledge.models.target import Target
from fledge.models.turned_rows import target_rows
from fledge.store.corpus import Corpus
from fledge.testing import EOS_TOKEN_ID, target_of, tiny_head, tiny_model
from tests.unit.training.train_support import CPU, SHORT, run

NUM_COMMON, NUM_LEARNED, NUM_DRAFTED = 12, 24, 40
PROMPTS = [(5, 9, 13), (7, 7, 30, 41), (60, 3)]


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture
def head(target: Target) -> Eagle3Head:
    found = tiny_head(target)
    found.common_V = torch.arange(found.config.draft_vocab_size) % 3 == 1
    return found


@pytest.mark.parametrize("turned_rows", [False, True])
def test_a_cpu_drafts_common_tokens_alone(target: Target, turned_rows: bool) -> None:
    head = tiny_head(target, turned_rows=turned_rows)
    all_ids = head.draft_to_target_V
    whole = fit_to_target(head, target)
    head.common_V = torch.arange(len(all_ids)) % 3 == 1
    served = fit_to_target(head, target)
    assert torch.equal(served.draft_to_target_V, all_ids[head.common_V])
    assert served.config.draft_vocab_size == int(head.common_V.sum())
    assert torch.equal(served.lm_head.weight, whole.lm_head.weight[head.common_V])
    assert head.config.draft_vocab_size == len(all_ids), "the head itself stays whole"
    for name, weight in whole.state_dict().items():
        if not name.startswith("lm_head"):
            assert torch.equal(served.state_dict()[name], weight), name


def test_other_devices_draft_all_tokens(head: Eagle3Head) -> None:
    elsewhere = target_of(tiny_model("llama").to("meta"))
    assert elsewhere.device.type == "meta"
    assert fit_to_target(head, elsewhere).config.draft_vocab_size == head.config.draft_vocab_size


def test_answers_stay_the_same(head: Eagle3Head, target: Target) -> None:
    params = SamplingParams(max_tokens=16)
    plain = [one.token_ids for one in Engine(target, None).generate(PROMPTS, params)]
    drafting = Engine(target, fit_to_target(head, target))
    assert [one.token_ids for one in drafting.generate(PROMPTS, params)] == plain
    assert drafting.stats.offered_at_depth[0] > 0


def test_files_keep_the_flags_and_exports_do_not(tmp_path: Path, head: Eagle3Head) -> None:
    head.config = replace(head.config, taps=(1, 2, 3))
    save_head(head, tmp_path / "head")
    read = load_head(tmp_path / "head")
    assert head.common_V is not None
    assert read.common_V is not None
    assert torch.equal(read.common_V, head.common_V)
    export_head(tmp_path / "head", tmp_path / "out", "vllm", verify=True)
    assert "common" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (lambda size: torch.ones(size - 1, dtype=torch.bool), "a flag .bool. for each of the"),
        (lambda size: torch.ones(size), "type float32"),
        (lambda size: torch.zeros(size, dtype=torch.bool), "names none of the drafted tokens"),
    ],
    ids=["short", "numbers", "none"],
)
def test_flags_that_fit_no_vocabulary_are_refused(
    tmp_path: Path, head: Eagle3Head, flags: object, message: str
) -> None:
    save_head(head, tmp_path / "head")
    place = tmp_path / "head" / "model.safetensors"
    tensors = load_file(place)
    tensors["common"] = flags(head.config.draft_vocab_size)  # type: ignore[operator]
    save_file(tensors, place)
    with pytest.raises(MismatchError, match=message):
        load_head(tmp_path / "head")


def test_training_calls_common_what_is_said_most_often(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    wanted = HeadSettings(turned_rows=True, draft_vocab_size=NUM_DRAFTED, common_tokens=NUM_COMMON)
    settings = replace(SHORT, head=wanted, held_out=replace(SHORT.held_out, share=0))
    run(tiny_target, tmp_path / "out", settings, corpus=tiny_corpus)
    head = load_head(tmp_path / "out")
    assert head.common_V is not None
    assert int(head.common_V.sum()) == NUM_COMMON
    counts = np.zeros(head.config.vocab_size, np.int64)
    for sample in Corpus.open(tiny_corpus):
        np.add.at(counts, sample.token_ids[sample.loss_mask == 1].astype(np.int64), 1)
    ids = head.draft_to_target_V.numpy()
    common = head.common_V.numpy()
    assert EOS_TOKEN_ID in ids[common]
    said = [token for token in ids[common] if token != EOS_TOKEN_ID]
    assert counts[said].min() >= counts[ids[~common]].max()
    target = Target.load(tiny_target, dtype=torch.float32, device=CPU)
    served = fit_to_target(head, target)
    rows_VD = target_rows(target.readout, served.draft_to_target_V)
    turn_DD = head.state_dict()["lm_head.turn"]
    assert torch.allclose(served.lm_head.weight, rows_VD @ turn_DD, atol=1e-6)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_tokens_that_no_loss_sees_are_drafted_too(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, ema: float
) -> None:
    few = HeadSettings(turned_rows=True, draft_vocab_size=NUM_LEARNED, common_tokens=NUM_COMMON)
    many = replace(few, draft_vocab_size=NUM_DRAFTED, learned_tokens=NUM_LEARNED)
    optimizer = replace(SHORT.optimizer, ema=ema)
    made = {}
    for name, wanted in (("few", few), ("many", many)):
        settings = replace(SHORT, head=wanted, optimizer=optimizer)
        run(tiny_target, tmp_path / name, settings, corpus=tiny_corpus)
        made[name] = load_head(tmp_path / name)
    for name, weight in made["few"].state_dict().items():
        assert torch.equal(made["many"].state_dict()[name], weight), f"{name} saw other losses"
    ids = {name: set(head.draft_to_target_V.tolist()) for name, head in made.items()}
    assert ids["few"] < ids["many"]
    assert len(ids["many"]) == NUM_DRAFTED
    common = made["many"].common_V
    assert common is not None
    assert set(made["many"].draft_to_target_V[common].tolist()) < ids["few"]
    target = Target.load(tiny_target, dtype=torch.float32, device=CPU)
    drafting = fit_to_target(made["many"], target)
    params = SamplingParams(max_tokens=16)
    plain = [one.token_ids for one in Engine(target, None).generate(PROMPTS, params)]
    assert [one.token_ids for one in Engine(target, drafting).generate(PROMPTS, params)] == plain


@pytest.mark.parametrize(
    ("drafted", "learned", "common", "message"),
    [
        (40, 20, 0, "20 and turned_rows false"),
        (40, 40, 0, "draft_vocab_size 40 and common_tokens 0"),
        (0, 20, 0, "draft_vocab_size 0"),
        (40, 8, 9, "learned_tokens is 8, draft_vocab_size 40 and common_tokens 9"),
    ],
)
def test_learned_tokens_lie_between_common_and_drafted_ones(
    drafted: int, learned: int, common: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        HeadSettings(
            turned_rows="false" not in message,
            draft_vocab_size=drafted,
            learned_tokens=learned,
            common_tokens=common,
        )


@pytest.mark.parametrize(("drafted", "common"), [(0, 5), (8, 8), (8, 9)])
def test_common_tokens_are_fewer_than_drafted_ones(drafted: int, common: int) -> None:
    with pytest.raises(ConfigError, match=f"common_tokens is {common} and draft_vocab_size"):
        HeadSettings(draft_vocab_size=drafted, common_tokens=common)
