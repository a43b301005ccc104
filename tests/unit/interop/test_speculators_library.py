"""Heads that the speculators library wrote draft here as they do there.

tests/fixtures/speculators holds tiny heads written by speculators 0.9.0 with the logits of its own
forward pass (tools/make_speculators_fixtures.py). Catches: a default of the library's config
classes that is read as another one, rotation, norms, windows, biases and the fed-back state.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fledge.interop.export import export_head
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.testing import tiny_model
from tests.unit.models.head_on_disk import assert_same

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "speculators"
NAMES = ("llama", "llama-normed", "qwen3")


class Steps:
    """Attention of the library's steps: all first keys up to one's own, then one's own of each."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._earlier: list[tuple[Tensor, Tensor]] = []

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = query.shape[1] // keys.shape[1]
        self._earlier.append((keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)))
        first_keys, first_values = self._earlier[0]
        steps = torch.arange(len(query))
        distance = steps[:, None] - steps[None, :]
        seen = (distance >= 0) & (distance < (self._window or len(query)))
        scale = query.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", query, first_keys).masked_fill(~seen, -torch.inf)
        own = [torch.einsum("qhd,qhd->hq", query, key)[..., None] for key, _ in self._earlier[1:]]
        weights = (torch.cat([scores, *own], -1) * scale).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights[..., : len(query)], first_values)
        for number, (_, value) in enumerate(self._earlier[1:]):
            out = out + weights[..., len(query) + number].T[..., None] * value
        return out


@torch.no_grad()
def draft(head: Eagle3Head, features: Tensor, token_ids: Tensor, num_steps: int) -> Tensor:
    """Logits of each step, fed the given tokens one further to the left each time."""
    assert head.own_embedding is not None
    hidden, attend, steps = head.fuse(features), Steps(head.config.sliding_window), []
    for step in range(num_steps):
        shifted = F.pad(token_ids[step:], (0, step))
        positions = torch.arange(len(token_ids)) + 1 + step
        embeds = F.embedding(shifted, head.own_embedding)
        output = head(embeds, hidden, positions, attend)
        hidden = output.feedback_TD
        steps.append(head.logits(output.normed_TD))
    return torch.stack(steps)


def check_logits(directory: Path, head: Eagle3Head) -> None:
    expected = load_file(directory / "expected.safetensors")
    logits = draft(head, expected["features"], expected["token_ids"], len(expected["logits"]))
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_library(name: str) -> None:
    check_logits(FIXTURES / name, load_head(FIXTURES / name))


def test_what_the_library_leaves_out_is_filled_in() -> None:
    """It writes what differs from its classes' defaults, and 1e-6 is one of those."""
    assert load_head(FIXTURES / "llama").config.rms_norm_eps == 1e-5
    config = load_head(FIXTURES / "llama-normed").config
    assert (config.rms_norm_eps, config.taps, config.output_bias) == (1e-6, (1, 4, 6, 7), True)
    assert load_head(FIXTURES / "qwen3").config.sliding_window == 4


@pytest.mark.parametrize("name", NAMES)
def test_its_heads_come_back_to_it_unchanged(tmp_path: Path, name: str) -> None:
    report = export_head(FIXTURES / name, tmp_path / "out", "speculators", verify=True)
    assert_same(load_head(report.directory), load_head(FIXTURES / name))


@pytest.mark.slow
def test_the_library_itself_writes_and_reads_them(tmp_path: Path) -> None:
    """In an environment with speculators 0.9.0, named by FLEDGE_SPECULATORS_PYTHON."""
    python = os.environ.get("FLEDGE_SPECULATORS_PYTHON")
    if not python:
        pytest.skip("FLEDGE_SPECULATORS_PYTHON names no environment with speculators")
    tool = ROOT / "tools" / "make_speculators_fixtures.py"
    subprocess.run([python, str(tool), str(tmp_path / "made")], check=True, capture_output=True)
    sizes = {"hidden_size": 8, "vocab_size": 40, "num_hidden_layers": 8, "intermediate_size": 12}
    tiny_model("llama", **sizes).save_pretrained(tmp_path / "target")
    for name in NAMES:
        made = load_file(tmp_path / "made" / name / "model.safetensors")
        kept = load_file(FIXTURES / name / "model.safetensors")
        assert made.keys() == kept.keys()
        assert all(torch.equal(made[key], kept[key]) for key in made)
        check_logits(tmp_path / "made" / name, load_head(tmp_path / "made" / name))
        place, target = tmp_path / "ours" / name, str(tmp_path / "target")
        export_head(FIXTURES / name, place, "speculators", target=target)
        subprocess.run(
            [python, "-c", _READ_BACK, str(place), str(FIXTURES / name)],
            check=True,
            env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
            stdout=sys.stderr,
        )


_READ_BACK = """
import sys, torch
from speculators.models.eagle3 import Eagle3DraftModel
from safetensors.torch import load_file
head = Eagle3DraftModel.from_pretrained(sys.argv[1])
kept = load_file(sys.argv[2] + "/model.safetensors")
state = head.state_dict()
del kept["embed_tokens.weight"]  # the library takes the target's
assert all(torch.equal(state[name], kept[name]) for name in kept)
"""
