"""Every setting is checked when it is made, and the message names the value that was given.

Catches a check that lets a bad value through (a negative temperature would flip the ranking of the
tokens, a seed of 2**63 would not fit the noise's integers), one that refuses a good one, and a
message that does not say what was wrong.
"""

import dataclasses
import math
from typing import Any

import pytest

from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    FetchError,
    FledgeError,
    MismatchError,
    RequestError,
)
from fledge.contracts.outputs import Stats
from fledge.contracts.progress import SilentProgress
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("min_tokens", -1, "0 (none) or positive"),
        ("min_tokens", 257, "max_tokens is 256"),
        ("logprobs", -1, "between 0 and 20"),
        ("logprobs", 21, "between 0 and 20"),
        ("temperature", -0.1, "0 (greedy) or a positive number"),
        ("temperature", math.inf, "0 (greedy) or a positive number"),
        ("temperature", math.nan, "0 (greedy) or a positive number"),
        ("top_k", -1, "0 (all tokens), or positive"),
        ("top_k", 2**63, "positive and below 2**63"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.01, "between 0 and 1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("min_p", math.nan, "between 0 and 1"),
        ("repetition_penalty", 0.0, "a positive number, 1 for none"),
        ("repetition_penalty", math.inf, "a positive number, 1 for none"),
        ("presence_penalty", math.nan, "must be a number"),
        ("frequency_penalty", math.inf, "must be a number"),
        ("seed", -1, "between 0 and 2**63 - 1"),
        ("seed", 2**63, "between 0 and 2**63 - 1"),
    ],
)
def test_sampling_parameters_out_of_range(name: str, value: float, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {value}")
    assert hint in message


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "logprobs"])
@pytest.mark.parametrize("value", [1.5, True, "3"])
def test_whole_numbers_are_wanted(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be a whole number."


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"]
)
def test_numbers_are_wanted(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '0.7'; it must be a number"):
        SamplingParams(**{name: "0.7"})


def test_a_bare_stop_text_is_refused() -> None:
    """It would be read as one stop text for each letter."""
    with pytest.raises(ConfigError, match="stop is the text 'abc'; it must be a tuple of texts"):
        SamplingParams(stop="abc")


def test_stop_token_ids_are_whole_numbers() -> None:
    with pytest.raises(ConfigError, match="a stop token id is '7'; it must be a whole number"):
        SamplingParams(**{"stop_token_ids": (3, "7")})


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"13": 1.0}, "a token id of logit_bias is '13'; it must be a whole number."),
        ({True: 1.0}, "a token id of logit_bias is True; it must be a whole number."),
        ({13: "1"}, "logit_bias of token 13 is '1'; it must be a number."),
        ({13: math.inf}, "logit_bias of token 13 is inf; it must be finite."),
        ({13: math.nan}, "logit_bias of token 13 is nan; it must be finite."),
        (((13, 1.0), (13, 2.0)), "logit_bias names token 13 twice; name it once."),
        ((13, 14), "logit_bias is (13, 14); it must map token ids to numbers, as in {13: -5.0}."),
        (5, "logit_bias is 5; it must map token ids to numbers, as in {13: -5.0}."),
    ],
)
def test_a_bias_maps_token_ids_to_numbers(bias: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{"logit_bias": bias})
    assert str(caught.value) == message


def test_a_bias_is_kept_in_order_and_does_not_change_any_more() -> None:
    bias = {5: 1, 3: -2.5}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 9
    assert params.logit_bias == ((3, -2.5), (5, 1.0))
    assert params == SamplingParams(logit_bias=((5, 1.0), (3, -2.5)))
    assert hash(params) == hash(dataclasses.replace(params))


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stop text is empty"):
        SamplingParams(stop=("end", ""))


@pytest.mark.parametrize(
    "good",
    [
        {"max_tokens": 1},
        {"min_tokens": 256},
        {"logprobs": 0},
        {"logprobs": 20},
        {"temperature": 1e-3},
        {"top_k": 10**6},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"seed": 2**63 - 1},
    ],
)
def test_sampling_parameters_at_the_edge_are_taken(good: dict[str, float]) -> None:
    params = SamplingParams(**good)
    assert {name: getattr(params, name) for name in good} == good


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize(("name", "high"), [("depth", 64), ("width", 64), ("budget", 1024)])
def test_tree_settings_have_bounds(name: str, high: int) -> None:
    for good in (1, high):
        TreeSettings(**{name: good})
    for bad in (0, -1, high + 1):
        with pytest.raises(ConfigError) as caught:
            TreeSettings(**{name: bad})
        assert str(caught.value) == f"tree {name} is {bad}; it must be between 1 and {high}."


@pytest.mark.parametrize("name", ["max_requests", "max_pass_tokens", "block_size"])
def test_engine_settings_have_lower_bounds(name: str) -> None:
    EngineSettings(**{"max_requests": 1, name: 1})
    with pytest.raises(ConfigError, match=rf"{name} is 0; it must be at least 1\."):
        EngineSettings(**{"max_requests": 1, name: 0})


def test_a_pass_holds_a_token_of_every_request() -> None:
    """Otherwise some decoding request would wait in every cycle."""
    EngineSettings(max_requests=7, max_pass_tokens=7)
    with pytest.raises(ConfigError) as caught:
        EngineSettings(max_requests=8, max_pass_tokens=7)
    assert "max_pass_tokens is 7 and max_requests is 8" in str(caught.value)


def test_cache_tokens_are_given_or_left_to_the_device() -> None:
    assert EngineSettings().cache_tokens == 0
    assert EngineSettings(cache_tokens=1).cache_tokens == 1
    with pytest.raises(ConfigError, match="cache_tokens is -1; it must be positive, or 0"):
        EngineSettings(cache_tokens=-1)


def test_unknown_accept_rule_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineSettings(accept="coin")
    assert "accept is 'coin'" in str(caught.value)
    assert "gumbel" in str(caught.value)
    assert "rejection" in str(caught.value)


def test_unknown_controller_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="controller is 'wild'.*adaptive.*fixed"):
        EngineSettings(controller="wild")


def test_settings_cannot_be_changed() -> None:
    for settings in (SamplingParams(), TreeSettings(), EngineSettings()):
        field = dataclasses.fields(settings)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, field, 1)


@pytest.mark.parametrize(
    ("depth", "width", "budget", "num_candidates", "num_nodes", "num_scratch"),
    [
        (1, 1, 1, 1, 1, 1),
        (1, 10, 60, 10, 10, 10),
        (7, 1, 60, 7, 7, 7),
        (3, 4, 5, 4 + 2 * 16, 5, 8),
        (8, 10, 60, 10 + 7 * 100, 60, 70),  # eagle3.md 1.9: 710 candidates at EAGLE's defaults
        (2, 2, 1000, 6, 6, 6),
    ],
)
def test_sizes_that_follow_from_a_tree(
    depth: int, width: int, budget: int, num_candidates: int, num_nodes: int, num_scratch: int
) -> None:
    tree = TreeSettings(depth=depth, width=width, budget=budget)
    assert tree.num_candidates == num_candidates
    assert tree.num_nodes == num_nodes
    assert tree.num_scratch == num_scratch


def stats(**figures: Any) -> Stats:
    nothing = {"num_tokens": 1, "cycles": 0, "prefill_s": 0.0, "decode_s": 0.0, "queue_s": 0.0}
    nothing |= {"longest_gap_s": 0.0, "num_prompt_reused": 0, "num_preemptions": 0}
    return Stats(**{**nothing, **figures})


def test_accept_length_leaves_out_the_token_of_the_prefill() -> None:
    measured = stats(num_tokens=10, cycles=3, prefill_s=1.0, decode_s=1.0)
    assert measured.accept_length == 3.0
    assert measured.tokens_per_s == 5.0
    assert stats().accept_length is None
    assert stats().tokens_per_s == 0.0


def test_times_of_a_request_follow_from_its_moments() -> None:
    """Waiting is part of the first token's time and of no other figure."""
    measured = stats(num_tokens=5, cycles=4, queue_s=3.0, prefill_s=1.0, decode_s=8.0)
    assert measured.time_to_first_token_s == 4.0
    assert measured.time_per_token_s == 2.0
    assert measured.tokens_per_s == 5 / 9
    assert stats().time_per_token_s is None


def test_exit_codes() -> None:
    usage = {ConfigError, RequestError}
    for error in (ConfigError, RequestError, ArtifactError, CapacityError, FetchError):
        assert issubclass(error, FledgeError)
        assert error.exit_code == (2 if error in usage else 1)
    assert MismatchError.exit_code == 1


def test_silent_progress_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    progress = SilentProgress()
    progress.note("hello")
    with progress.task("reading", total=None) as task:
        task.advance(3)
        task.update_total(5)
    assert capfd.readouterr() == ("", "")
