"""Heads whose output rows are the target's, turned by one matrix.

Catches: rows that are saved or learned, a head that says something else once its rows are written
out, weights that are measured with the rows of another matrix, and exports without rows.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fledge import Engine, SamplingParams
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.contracts.head_settings import HeadSettings
from fledge.interop.export import export_head
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head, save_head
from fledge.models.target import Target
from fledge.models.turned_rows import TurnedRows, target_rows
from fledge.training.assembly import assemble, load_target
from fledge.training.decoding import HeldOutDecoder, sum_completions
from fledge.training.distributed import Processes
from fledge.training.train_plan import plan_training
from tests.unit.training.train_support import (
    CPU,
    SHORT,
    Notes,
    losses,
    opened,
    run,
    with_held_out,
    with_optimizer,
)

TURNED = replace(SHORT, head=HeadSettings(turned_rows=True))
PROMPTS = [(5, 9, 13), (7, 7, 30, 41), (60, 3)]


@pytest.fixture(scope="module")
def trained(folder: Path, tiny_target: Path, tiny_corpus: Path) -> Path:
    run(tiny_target, folder / "turned", TURNED, corpus=tiny_corpus)
    return folder / "turned"


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target, dtype=torch.float32, device=CPU)


def test_the_matrix_is_all_that_is_learned_and_stored(trained: Path) -> None:
    stored = load_file(trained / "model.safetensors")
    assert "lm_head.weight" not in stored
    turn_DD = stored["lm_head.turn"]
    assert turn_DD.shape == (len(turn_DD), len(turn_DD))
    assert not torch.equal(turn_DD, torch.eye(len(turn_DD)))
    assert losses(trained, "held_out")[-1] < losses(trained)[0]


def test_written_out_it_says_the_same(trained: Path, target: Target) -> None:
    turned = load_head(trained)
    rows_VD = target_rows(target.readout, turned.draft_to_target_V)
    assert isinstance(turned.lm_head, TurnedRows)
    turned.lm_head.rows_VD = rows_VD
    whole = fit_to_target(turned, target)
    assert isinstance(whole.lm_head, torch.nn.Linear)
    assert not whole.config.turned_rows
    normed_TD = torch.randn(5, whole.config.hidden_size)
    expected = (normed_TD.double() @ turned.lm_head.turn.double().T) @ rows_VD.double().T
    for head in (turned, whole):
        assert torch.allclose(head.logits(normed_TD).double(), expected, atol=1e-4)
    for name, weight in turned.state_dict().items():
        if not name.startswith("lm_head"):
            assert torch.equal(whole.state_dict()[name], weight), name
    assert torch.equal(whole.draft_to_target_V, turned.draft_to_target_V)


def test_a_half_precision_head_is_turned_in_full_precision(trained: Path, target: Target) -> None:
    turned = load_head(trained).bfloat16()
    whole = turned.with_own_rows(target_rows(target.readout, turned.draft_to_target_V))
    turn_DD = turned.state_dict()["lm_head.turn"].float()
    rows_VD = target_rows(target.readout, turned.draft_to_target_V) @ turn_DD
    assert torch.equal(whole.lm_head.weight, rows_VD.bfloat16())


def test_the_engine_drafts_with_it(trained: Path, tiny_target: Path) -> None:
    params = SamplingParams(max_tokens=12)
    with_it = Engine.load(str(tiny_target), head=trained, device="cpu", dtype="float32")
    plain = Engine.load(str(tiny_target), head=None, device="cpu", dtype="float32")
    answers = with_it.generate(PROMPTS, params)
    assert [one.token_ids for one in answers] == [
        one.token_ids for one in plain.generate(PROMPTS, params)
    ]
    assert with_it.stats.offered_at_depth[0] > 0


def test_decoding_on_the_way_has_the_rows_of_the_newest_matrix(
    trained: Path, target: Target
) -> None:
    head = load_head(trained)
    decoder = HeldOutDecoder(
        target, head.config, head.draft_to_target_V, PROMPTS, depth=3, max_tokens=20
    )
    other = load_head(trained)
    assert isinstance(other.lm_head, TurnedRows)
    with torch.no_grad():
        other.lm_head.turn.neg_()
    for one in (head, other, head):
        sums = decoder.measure(one.state_dict())
        fresh = Engine(target, fit_to_target(one, target), decoder._engine.settings)
        answers = fresh.generate(PROMPTS, SamplingParams(max_tokens=20))
        assert sums == sum_completions(answers, 3)


def test_an_average_of_the_weights_is_measured_with_the_same_rows(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    settings = with_held_out(with_optimizer(TURNED, ema=0.5), decode_prompts=2, decode_tokens=8)
    run(tiny_target, tmp_path / "ema", settings, corpus=tiny_corpus)
    assert losses(tmp_path / "ema", "held_out")[-1] < losses(tmp_path / "ema")[0]


def test_training_goes_on_from_it(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, trained: Path
) -> None:
    given = opened(tiny_target, corpus=tiny_corpus, start=trained, settings=TURNED)
    parts = assemble(given, TURNED, load_target(given, TURNED, Notes()), Processes(device=CPU))
    for name, weight in load_head(trained).state_dict().items():
        assert torch.equal(parts.optimizer.weights[f"head.{name}"], weight), name
    with pytest.raises(MismatchError, match=r"turned_rows True.*--set train.head.turned_rows=true"):
        opened(tiny_target, corpus=tiny_corpus, start=trained)


def test_a_plan_knows_rows_that_are_no_weights(tiny_target: Path, tiny_features: Path) -> None:
    """They take memory and time, though less than rows that learn, and no room in files."""
    given = opened(tiny_target, features=tiny_features)
    whole, turned = (
        plan_training(given, settings, itemsize=4, flops_per_s=1e9) for settings in (SHORT, TURNED)
    )
    config = given.head_config(TURNED)
    rows, matrix = config.draft_vocab_size * config.hidden_size, config.hidden_size**2
    assert turned.weights == whole.weights - rows + matrix
    assert turned.checkpoint_bytes * whole.weights == whole.checkpoint_bytes * turned.weights
    assert turned.device_bytes == whole.device_bytes - 4 * 4 * (rows - matrix) + 4 * rows
    assert whole.seconds is not None
    multiplied = turned.weights + rows * 2 / 3
    assert turned.seconds == pytest.approx(whole.seconds * multiplied / whole.weights)


def test_an_export_has_whole_rows(
    tmp_path: Path, trained: Path, tiny_target: Path, target: Target
) -> None:
    head = load_head(trained)
    # vLLM wants ascending layers, and this target is too shallow for the default ones.
    head.config = replace(head.config, taps=(0, 1, 2))
    save_head(head, tmp_path / "head")
    place = tmp_path / "head"
    report = export_head(place, tmp_path / "out", "vllm", target=str(tiny_target), verify=True)
    exported: Eagle3Head = load_head(report.directory)
    whole = fit_to_target(load_head(place), target)
    assert torch.equal(exported.lm_head.weight, whole.lm_head.weight)
    with pytest.raises(ConfigError, match=r"turned_rows.*--target"):
        export_head(place, tmp_path / "none", "vllm")
    assert not (tmp_path / "none").exists()


def test_rows_that_are_turned_are_the_targets() -> None:
    with pytest.raises(ConfigError, match=r"turned_rows is true and lm_head_from_target false"):
        HeadSettings(turned_rows=True, lm_head_from_target=False)
