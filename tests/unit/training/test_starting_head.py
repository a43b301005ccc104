"""Training that goes on from a head which is there already."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.contracts.errors import ArtifactError, ConfigError, FledgeError, MismatchError
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import load_head, save_head
from fledge.store.manifest import read_manifest
from fledge.training.assembly import assemble, load_target
from fledge.training.checkpoint import list_checkpoints
from fledge.training.distributed import Processes
from fledge.training.starting_head import StartingHead
from tests.unit.training.train_support import (
    CPU,
    SHORT,
    Notes,
    losses,
    opened,
    run,
    with_optimizer,
)

MLP = "midlayer.mlp"
GENTLE = with_optimizer(SHORT, learning_rate=1e-6)
SHAPE = HeadConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=4,
)


@pytest.fixture(scope="module")
def first(folder: Path, tiny_target: Path, tiny_corpus: Path) -> Path:
    run(tiny_target, folder / "first", SHORT, corpus=tiny_corpus)
    return folder / "first"


def test_it_begins_with_the_weights_of_the_head(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, first: Path
) -> None:
    given = opened(tiny_target, corpus=tiny_corpus, start=first)
    target = load_target(given, SHORT, Notes())
    parts = assemble(given, SHORT, target, Processes(device=CPU))
    begun, stored = dict(parts.optimizer.weights), load_head(first).state_dict()
    for name, weight in stored.items():
        assert torch.equal(begun[f"head.{name}"], weight), name
    manifest = run(tiny_target, tmp_path / "more", GENTLE, corpus=tiny_corpus, start=first)
    assert given.start is not None
    assert manifest.plan.parents["head"] == given.start.fingerprint
    # Where it begins is where the other run ended, and far from where that one began.
    began, ended = losses(tmp_path / "more")[0], losses(first, "held_out")[-1]
    assert abs(began - ended) < abs(losses(first)[0] - ended)


def test_units_that_end_idle_are_left_out(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    wide = replace(GENTLE, head=replace(GENTLE.head, mlp_width=130))
    run(tiny_target, tmp_path / "wide", wide, corpus=tiny_corpus)
    head = load_head(tmp_path / "wide")
    with torch.no_grad():  # without gradients in any of the three they stay what they are
        for rows in (f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"):
            head.get_parameter(rows)[:70] = 0.0
        head.get_parameter(f"{MLP}.down_proj.weight")[:, :70] = 0.0
    save_head(head, tmp_path / "idle")
    manifest = run(
        tiny_target, tmp_path / "slim", wide, corpus=tiny_corpus, start=tmp_path / "idle"
    )
    slim = load_head(tmp_path / "slim")
    assert slim.config.intermediate_size == manifest.counts["mlp_width"] == 64
    (best,) = [
        load_head(record.directory)
        for record in list_checkpoints(tmp_path / "slim")
        if record.step == manifest.counts["best_step"]
    ]
    assert best.config.intermediate_size == 130
    hidden = torch.randn(3, slim.config.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(slim.midlayer.mlp(hidden), best.midlayer.mlp(hidden))


def test_another_start_is_another_run(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, first: Path
) -> None:
    run(tiny_target, tmp_path / "more", corpus=tiny_corpus, start=first)
    run_again = read_manifest(tmp_path / "more").fingerprint
    assert (
        run(tiny_target, tmp_path / "more", corpus=tiny_corpus, start=first).fingerprint
        == run_again
    )
    with pytest.raises(FledgeError, match="more"):
        run(tiny_target, tmp_path / "more", SHORT, corpus=tiny_corpus)


def test_output_rows_are_taken_by_token() -> None:
    old = Eagle3Head(SHAPE, torch.tensor([3, 7, 20, 41]))
    new = Eagle3Head(replace(SHAPE, draft_vocab_size=5), torch.tensor([1, 7, 9, 20, 49]))
    own_rows = new.lm_head.weight.detach().clone()
    StartingHead(Path("old"), old).give_to(new)
    for row, number in ((1, 1), (3, 2)):
        assert torch.equal(new.lm_head.weight[row], old.lm_head.weight[number])
    for row in (0, 2, 4):
        assert torch.equal(new.lm_head.weight[row], own_rows[row])
    assert torch.equal(new.fc.weight, old.fc.weight)


def test_a_wider_head_begins_by_saying_the_same() -> None:
    old = Eagle3Head(SHAPE, torch.tensor([3, 7, 20, 41]))
    new = Eagle3Head(replace(SHAPE, intermediate_size=40), old.draft_to_target_V)
    StartingHead(Path("old"), old).give_to(new)
    mlps = [dict(head.named_modules())[MLP] for head in (old, new)]
    hidden_TD = torch.randn(5, SHAPE.hidden_size)
    with torch.no_grad():
        first_TD, second_TD = (mlp(hidden_TD) for mlp in mlps)
    torch.testing.assert_close(first_TD, second_TD)
    assert new.get_parameter(f"{MLP}.gate_proj.weight")[24:].abs().sum() > 0


def test_more_attention_heads_begin_by_saying_the_same() -> None:
    config = replace(SHAPE, num_heads=4, num_kv_heads=2, head_dim=4)
    old = Eagle3Head(config, torch.tensor([3, 7, 20, 41]))
    new = Eagle3Head(replace(config, num_heads=6, num_kv_heads=3), old.draft_to_target_V)
    StartingHead(Path("old"), old).give_to(new)
    embeds_TD, hidden_TD = torch.randn(5, 16), torch.randn(5, 16)

    def attend(query_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> Tensor:
        shared = query_THD.shape[1] // keys_TGD.shape[1]
        keys, values = (one.repeat_interleave(shared, dim=1) for one in (keys_TGD, values_TGD))
        scores = torch.einsum("thd,shd->hts", query_THD, keys).softmax(-1)
        return torch.einsum("hts,shd->thd", scores, values)

    with torch.no_grad():
        outputs = [head(embeds_TD, hidden_TD, torch.arange(5), attend) for head in (old, new)]
    torch.testing.assert_close(outputs[0].normed_TD, outputs[1].normed_TD)
    assert new.midlayer.self_attn.q_proj.weight[16:].abs().sum() > 0


def test_the_fingerprint_is_of_weights_and_tokens() -> None:
    head = Eagle3Head(SHAPE, torch.tensor([3, 7, 20, 41]))
    mark = StartingHead(Path("a"), head).fingerprint
    assert StartingHead(Path("b"), head).fingerprint == mark
    head.draft_to_target_V = torch.tensor([3, 7, 20, 42])
    assert StartingHead(Path("a"), head).fingerprint != mark


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intermediate_size": 56},
            "intermediate_size 56, and the head to be trained 48; give --set "
            "train.head.mlp_width=56",
        ),
        (
            {"num_heads": 8, "num_kv_heads": 4},
            "num_heads 8, and the head to be trained 4; give --set train.head.attention_heads=8",
        ),
        ({"num_kv_heads": 1}, "num_kv_heads 1, and the head to be trained 2; begin with a new"),
        ({"fc_norm": True}, "fc_norm True.*train.head.fc_norm=true"),
        ({"norm_before_fc": True}, "norm_before_fc True.*train.head.norm_before_fc=true"),
        ({"sliding_window": 8}, "train.head.sliding_window=8"),
        ({"qk_norm": True}, "qk_norm True, and the head to be trained False; begin with a new"),
        ({"taps": (1, 2, 3)}, r"\[1, 2, 3\].*capture.layers=\[1, 2, 3\]"),
    ],
)
def test_a_head_of_another_shape_is_refused(
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    tiny_target: Path,
    tiny_corpus: Path,
    first: Path,
) -> None:
    known = load_head(first)
    other = Eagle3Head(replace(known.config, **changes), known.draft_to_target_V)
    save_head(other, tmp_path / "other")
    with pytest.raises(MismatchError, match=message):
        run(tiny_target, tmp_path / "more", corpus=tiny_corpus, start=tmp_path / "other")


def test_a_head_with_its_own_embedding_is_refused(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, first: Path
) -> None:
    known = load_head(first)
    save_head(known, tmp_path / "own")
    weights = load_file(tmp_path / "own" / "model.safetensors")
    sizes = (known.config.vocab_size, known.config.hidden_size)
    weights["embed_tokens.weight"] = torch.zeros(sizes)
    save_file(weights, tmp_path / "own" / "model.safetensors")
    with pytest.raises(MismatchError, match="embedding of its own"):
        run(tiny_target, tmp_path / "more", corpus=tiny_corpus, start=tmp_path / "own")


def test_a_place_without_a_head_is_refused(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    with pytest.raises((ArtifactError, ConfigError), match="nowhere"):
        run(tiny_target, tmp_path / "more", corpus=tiny_corpus, start=tmp_path / "nowhere")
