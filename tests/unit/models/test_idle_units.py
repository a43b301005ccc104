"""Units of an MLP that weight decay has shrunk to nothing are left out; drafts stay the same."""

from pathlib import Path

import torch

from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import load_head, save_head
from fledge.models.idle_units import without_idle_units
from fledge.testing import draw_wide

WIDTH = 160


def head_with_idle_units(num_busy: int) -> Eagle3Head:
    config = HeadConfig(
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=WIDTH,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=96,
        draft_vocab_size=64,
    )
    head = Eagle3Head(config).eval()
    draw_wide(head, seed=0)
    idle_U = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))[num_busy:]
    mlp = head.midlayer.mlp
    with torch.no_grad():
        for rows in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.t()):
            rows[idle_U] *= 1e-9
    return head


def test_drafts_stay_what_they_are(tmp_path: Path) -> None:
    head = head_with_idle_units(100)
    head.common_V = torch.arange(head.config.draft_vocab_size) < 5
    slim = without_idle_units(head)
    assert slim.config.intermediate_size == 128
    hidden = torch.randn(7, head.config.hidden_size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(slim.midlayer.mlp(hidden), head.midlayer.mlp(hidden))
    save_head(slim, tmp_path / "slim")
    read = load_head(tmp_path / "slim")
    assert read.config == slim.config
    assert read.common_V is not None
    assert torch.equal(read.common_V, head.common_V)
    mine, theirs = read.state_dict(), head.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if ".mlp." not in name)


def test_a_head_without_idle_units_is_itself() -> None:
    for num_busy in (WIDTH, 130):
        head = head_with_idle_units(num_busy)
        assert without_idle_units(head) is head


def test_a_head_that_does_nothing_keeps_some_units() -> None:
    silent = head_with_idle_units(WIDTH)
    with torch.no_grad():
        silent.midlayer.mlp.down_proj.weight.zero_()
    assert without_idle_units(silent).config.intermediate_size == 64


def test_nothing_is_told_of_weights_that_are_no_numbers() -> None:
    head = head_with_idle_units(10)
    with torch.no_grad():
        head.midlayer.mlp.up_proj.weight[0, 0] = float("nan")
    assert without_idle_units(head) is head
