"""Passes on native kernels against the plain layers: trees, windows, taps, heads, and what replaces
them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import ConfigError
from fledge.models import native_check
from fledge.models.target import Target
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVGroups
from fledge.ops.native_library import native_library
from fledge.ops.paged import BlockTables, TreePass
from fledge.store.compiler import find_compiler
from fledge.testing import target_of, tiny_head, tiny_model
from tests.lossless.support import greedy, prompts, token_ids
from tests.paged_cases import BLOCK_SIZE, tree_pass

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
ARCHITECTURES = ("llama-tied", "qwen2", "qwen3", "gemma2-hybrid", "gemma3-hybrid", "olmo2")
REQUESTS = [(9, 1, 6), (3, 4, 0), (20, 1, 0), (0, 11, 5)]


def _native_target(architecture: str) -> Target:
    with choose_kernels("native"):
        target = target_of(tiny_model(architecture))
        assert target.why_plain is None
    return target


def _passes(target: Target) -> Iterator[TreePass]:
    """The contexts of some requests, then chains and trees behind them."""
    with choose_kernels("native"):
        decoder = target._fast_decoder()
    assert decoder is not None
    assert decoder._native is not None
    windows = decoder._native.windows
    for contexts in (True, False):
        requests = [(0, max(1, c), 0) if contexts else (c, n, d) for c, n, d in REQUESTS]
        packed = tree_pass(requests, windows[0])
        # One table for all kinds of attention, with room for both passes.
        table_BP = torch.arange(len(REQUESTS) * 4).view(len(REQUESTS), 4)
        tables = BlockTables(BLOCK_SIZE, dict.fromkeys(windows, table_BP))
        packed = replace(packed, tables=tables)
        packed.token_ids_T.copy_(torch.arange(packed.num_tokens) * 7 % 90 + 3)
        yield packed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_passes_equal_the_plain_ones(architecture: str) -> None:
    target = _native_target(architecture)
    found = {}
    for choice in ("native", "plain"):
        outputs = []
        with choose_kernels(choice):
            memory: KVGroups | None = None
            for packed in _passes(target):
                if memory is None:
                    memory = KVGroups(dict.fromkeys(packed.tables.by_window, 4 * 4 * 16))
                outputs.append(target.forward(packed, memory, taps=(0, 1, 2)))
        found[choice] = outputs
    for ours, theirs in zip(found["native"], found["plain"], strict=True):
        torch.testing.assert_close(ours.logits_RV, theirs.logits_RV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.features_TF, theirs.features_TF, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3-hybrid"])
def test_heads_and_trees_change_nothing(architecture: str) -> None:
    """Also the native steps of a head, whose weights are rounded."""
    target = _native_target(architecture)
    asked = prompts(3)
    settings = EngineSettings(
        controller="fixed", tree=TreeSettings(depth=4, width=3, budget=9), max_requests=2
    )
    with choose_kernels("native"):
        engine = Engine(target, tiny_head(target), settings)
        answers = engine.generate(asked, SamplingParams(max_tokens=12))
    assert token_ids(answers) == greedy(architecture, asked, max_tokens=12)


def test_a_head_drafts_what_its_twin_drafts() -> None:
    """Rounded to 8 bits, nearly the same drafts; other weights may be loaded into it later."""
    target = _native_target("llama-tied")
    settings = EngineSettings(controller="fixed", tree=TreeSettings(depth=3, width=1, budget=3))
    asked, lengths = prompts(2), {}
    for choice in ("native", "plain"):
        with choose_kernels(choice):
            head = tiny_head(target)
            engine = Engine(target, head, settings)
            before = engine.generate(asked, SamplingParams(max_tokens=8))
            head.load_state_dict(tiny_head(target, seed=5).state_dict())
            after = engine.generate(asked, SamplingParams(max_tokens=8))
            lengths[choice] = [one.stats.accept_length for one in (*before, *after)]
    assert lengths["native"] == pytest.approx(lengths["plain"], abs=0.3)


def test_without_a_compiler_plain_operations_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("fledge.ops.kernel_choice._MANY_BYTES", 0)
    native_library.cache_clear()
    native_check._checked_library.cache_clear()
    try:
        asked = prompts(1)
        for _ in range(2):
            target = target_of(tiny_model("llama-tied"))
            answers = Engine(target).generate(asked, SamplingParams(max_tokens=4))
        assert token_ids(answers) == greedy("llama-tied", asked, max_tokens=4)
        said = [one for one in caplog.messages if "native kernels are not used" in one]
        assert len(said) == 1
        assert "there is no C++ compiler" in said[0]
        native_check._checked_library.cache_clear()
        with (
            choose_kernels("native"),
            pytest.raises(ConfigError, match="FLEDGE_KERNELS is 'native', but there is no C"),
        ):
            Engine(target_of(tiny_model("llama-tied"))).generate(
                asked, SamplingParams(max_tokens=4)
            )
    finally:
        native_library.cache_clear()
        native_check._checked_library.cache_clear()


def test_wrong_kernels_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_check, "is_close", lambda *_: False)
    monkeypatch.setattr("fledge.ops.kernel_choice._MANY_BYTES", 0)
    target = target_of(tiny_model("llama-tied"))
    answers = Engine(target).generate(prompts(1), SamplingParams(max_tokens=4))
    assert token_ids(answers) == greedy("llama-tied", prompts(1), max_tokens=4)
    assert any("something else than the plain operations" in one for one in caplog.messages)
