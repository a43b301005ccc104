"""What a capture takes, before it runs: golden figures, and agreement with what is stored."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.feature_formats import FORMATS
from fledge.features.capture_layout import make_layout
from fledge.features.capture_plan import (
    CorpusFacts,
    TargetSizes,
    choose_target_format,
    format_binary,
    plan_capture,
    with_overhead,
)

MIB, TIB = 1 << 20, 1 << 40
SETTINGS = CaptureSettings(features="q5", target="auto", target_features="q8", top_k=64)


def uniform(num_samples: int, length: int, num_labels: int) -> CorpusFacts:
    """Samples of one length, with loss on their last tokens."""
    return CorpusFacts(
        num_samples=num_samples,
        num_unlabelled=0,
        num_tokens=num_samples * length,
        kept_tokens=num_samples * length,
        read_tokens=num_samples * (length - 1),
        feature_rows=num_samples * (length - 2),
        label_rows=num_samples * num_labels,
    )


def sizes(hidden_size: int, num_parameters: int = 14_000_000_000) -> TargetSizes:
    return TargetSizes(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        vocab_size=151_936,
        draft_vocab_size=32_000,
        itemsize=2,
        num_parameters=num_parameters,
        num_active_parameters=num_parameters,
    )


def test_golden_figures_of_what_the_field_stores() -> None:
    """8H bytes a token: 80 MiB for 2048 tokens at hidden size 5120, whatever the depth."""
    sample = plan_capture(uniform(1, 2048, 1024), sizes(5120), SETTINGS, num_taps=3)
    assert sample.field_bytes_per_token == 8 * 5120
    assert sample.field_bytes == 80 * MIB
    facts = uniform(500_000, 2048, 1024)
    plan = plan_capture(facts, sizes(5120), SETTINGS, num_taps=3)
    assert round(plan.field_bytes / TIB, 1) == 38.1
    assert round(with_overhead(plan.field_bytes) / TIB, 2) == 40.05
    text = "\n".join(plan.lines())
    assert "40,960 bytes a token: 38.15 TiB, 40.05 TiB with 5% overhead" in text
    for num_parameters in (3_000_000_000, 670_000_000_000):
        other = plan_capture(facts, sizes(5120, num_parameters), SETTINGS, num_taps=3)
        assert other.field_bytes == plan.field_bytes
        assert other.formats == plan.formats
        assert other.needed_bytes == plan.needed_bytes
    wider = plan_capture(facts, sizes(8192), SETTINGS, num_taps=3)
    assert wider.field_bytes == 1.6 * plan.field_bytes


def test_formats_side_by_side() -> None:
    plan = plan_capture(uniform(1000, 2048, 1024), sizes(5120), SETTINGS, num_taps=3)
    assert [entry.name for entry in plan.formats] == list(FORMATS)
    rows = {entry.name: entry.row_bytes for entry in plan.formats}
    assert rows == {"exact": 30720, "q8": 15600, "q6": 11760, "q5": 9840, "q4": 7920}
    shares = {entry.name: round(entry.share, 3) for entry in plan.formats}
    # Half of the tokens have a label, and their 64 most probable tokens take 256 bytes.
    assert shares == {"exact": 0.753, "q8": 0.384, "q6": 0.29, "q5": 0.243, "q4": 0.197}
    chosen = next(entry for entry in plan.formats if entry.name == "q5")
    assert plan.total_bytes == chosen.total_bytes
    assert plan.needed_bytes == with_overhead(plan.total_bytes)
    assert "* q5" in "\n".join(plan.lines())
    assert json.loads(json.dumps(plan.to_json()))["formats"][3]["name"] == "q5"


@pytest.mark.parametrize("features", FORMATS)
@pytest.mark.parametrize("target", ["hidden", "topk", "auto"])
@pytest.mark.parametrize("hidden_size", [48, 576])
def test_bytes_are_those_of_the_layout(features: str, target: str, hidden_size: int) -> None:
    settings = replace(SETTINGS, features=features, target=target)
    facts, target_sizes = uniform(10, 100, 30), sizes(hidden_size)
    plan = plan_capture(facts, target_sizes, settings, num_taps=3)
    layout = make_layout(settings, (2, 5, 8), target_sizes, torch.bfloat16)
    expected = (
        1000 * layout.bytes_per("tokens")
        + 980 * layout.bytes_per("features")
        + 300 * layout.bytes_per("labels")
    )
    assert plan.total_bytes == expected
    assert plan.target == layout.target


def test_auto_takes_the_smaller_way_to_keep_the_distribution() -> None:
    settings = SETTINGS
    assert choose_target_format(settings, sizes(5120)) == "topk"
    assert choose_target_format(settings, sizes(192)) == "hidden"
    assert choose_target_format(replace(settings, target="hidden"), sizes(5120)) == "hidden"
    # A row of 192 values takes 198 bytes, the 49 most probable tokens 196.
    assert choose_target_format(replace(settings, top_k=49), sizes(192)) == "topk"


def test_time_is_that_of_the_slower_of_reading_and_writing() -> None:
    facts, target = uniform(1000, 1001, 500), sizes(4096, 8_000_000_000)

    def seconds(**rates: float) -> float | None:
        return plan_capture(facts, target, SETTINGS, num_taps=3, **rates).seconds

    assert seconds() is None
    assert seconds(flops_per_s=32e12) == pytest.approx(1000)
    assert seconds(flops_per_s=32e12, disk_bytes_per_s=1e9) == pytest.approx(1000)
    slow = plan_capture(
        facts, target, SETTINGS, num_taps=3, flops_per_s=32e12, disk_bytes_per_s=1e6
    )
    assert slow.seconds == pytest.approx(slow.total_bytes / 1e6)
    assert "time: about" in "\n".join(slow.lines())


def test_memory_grows_with_the_pass_and_the_target() -> None:
    facts, settings = uniform(1000, 1000, 500), SETTINGS

    def device_bytes(settings: CaptureSettings, target: TargetSizes) -> int:
        return plan_capture(facts, target, settings, num_taps=3).device_bytes

    usual = device_bytes(settings, sizes(4096))
    assert usual > 28e9
    assert device_bytes(replace(settings, pass_tokens=65536), sizes(4096)) > usual
    assert device_bytes(settings, sizes(4096, 70_000_000_000)) > usual + 100e9
    assert device_bytes(replace(settings, features="exact"), sizes(4096)) < usual


def test_an_empty_corpus_takes_nothing() -> None:
    plan = plan_capture(uniform(0, 0, 0), sizes(64), SETTINGS, num_taps=3)
    assert (plan.total_bytes, plan.num_shards, plan.host_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (80 * MIB, "80.00 MiB"),
        (5 << 50, "5.00 PiB"),
        (3 << 60, "3072.00 PiB"),
    ],
)
def test_sizes_for_people(amount: int, text: str) -> None:
    assert format_binary(amount) == text


def test_planning_needs_no_torch() -> None:
    code = "import sys, fledge.features.capture_plan; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[3] / "src"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
