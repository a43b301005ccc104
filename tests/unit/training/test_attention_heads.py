"""Heads whose attention has more heads than the target's, from settings to files of engines.

Catches: a shape that training, its plan, its files or an export takes from the target, and a run
that goes on from a head of another shape.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from fledge import Engine, SamplingParams
from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.dialects import Dialect
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.contracts.head_settings import HeadSettings
from fledge.interop.export import export_head
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.training.stage import train
from fledge.training.train_plan import plan_training
from tests.unit.training.train_support import CPU, SHORT, losses, opened, with_held_out

WIDE = with_held_out(
    replace(SHORT, head=HeadSettings(attention_heads=8)), decode_prompts=2, decode_tokens=6
)
LAYERS = CaptureSettings(layers=(1, 2, 3))
"""Engines want layers in ascending order; the default ones of so small a target are in no such."""

FORMATS: list[Dialect] = ["vllm", "sglang", "openvino"]


@pytest.fixture(scope="module")
def trained(folder: Path, tiny_target: Path, tiny_corpus: Path) -> Path:
    given = opened(tiny_target, corpus=tiny_corpus, settings=WIDE, capture=LAYERS)
    train(given, WIDE, folder / "wide", has_plots=False)
    return folder / "wide"


def test_it_learns_and_is_stored(trained: Path) -> None:
    config, weights = load_head(trained).config, load_head(trained).state_dict()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 8)
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    assert weights["midlayer.self_attn.v_proj.weight"].shape == (32, 64)
    assert weights["midlayer.self_attn.o_proj.weight"].shape == (32, 64)
    assert losses(trained, "held_out")[-1] < losses(trained)[0]


def test_it_drafts_for_its_target(trained: Path, tiny_target: Path) -> None:
    target = Target.load(tiny_target, dtype=torch.float32, device=CPU)
    asked, params = [(5, 9, 13), (7, 7, 30, 41), (60, 3)], SamplingParams(max_tokens=12)
    answers = Engine(target, load_head(trained)).generate(asked, params)
    plain = Engine(target).generate(asked, params)
    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]


def test_a_plan_counts_it(tiny_target: Path, tiny_features: Path) -> None:
    given = opened(tiny_target, features=tiny_features)
    usual, wide = (plan_training(given, one, itemsize=4) for one in (SHORT, WIDE))
    more_heads = 4 * 8 + 2 * 8
    # Queries, and what turns them back; keys and values: 4 query heads and 2 key heads more.
    assert wide.weights - usual.weights == 4 * 8 * (64 + 32) + 2 * 2 * 8 * 64
    weights_bytes = 4 * 4 * (wide.weights - usual.weights)
    kept_bytes = 4 * SHORT.micro_tokens * SHORT.loss.steps * 2 * more_heads
    assert wide.device_bytes - usual.device_bytes == weights_bytes + kept_bytes


def test_training_goes_on_only_with_as_many(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, trained: Path
) -> None:
    given = opened(tiny_target, corpus=tiny_corpus, settings=WIDE, capture=LAYERS, start=trained)
    train(given, WIDE, tmp_path / "more", has_plots=False)
    assert load_head(tmp_path / "more").config == load_head(trained).config
    message = "num_heads 8, and the head to be trained 4; give --set train.head.attention_heads=8"
    with pytest.raises(MismatchError, match=message):
        opened(tiny_target, corpus=tiny_corpus, capture=LAYERS, start=trained)
    odd = replace(WIDE, head=HeadSettings(attention_heads=5))
    with pytest.raises(ConfigError, match="attention_heads is 5, and 2 query heads"):
        opened(tiny_target, corpus=tiny_corpus, settings=odd)


@pytest.mark.parametrize("to", FORMATS)
def test_engines_are_told(tmp_path: Path, trained: Path, tiny_target: Path, to: Dialect) -> None:
    export_head(trained, tmp_path / "out", to, target=str(tiny_target), verify=True)
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    assert [told[name] for name in names] == [8, 4, 8]


def test_llamacpp_is_told(tmp_path: Path, trained: Path, tiny_target: Path) -> None:
    export_head(trained, tmp_path / "out", "gguf", target=str(tiny_target), verify=True)

    def told(file: str, key: str) -> int:
        field = GGUFReader(tmp_path / "out" / file).get_field(key)
        assert field is not None
        return int(field.contents())

    for architecture, file, counts in (
        ("eagle3", "head.gguf", (8, 4)),
        ("llama", "target.gguf", (4, 2)),
    ):
        heads = f"{architecture}.attention.head_count"
        assert (told(file, heads), told(file, f"{heads}_kv")) == counts
