"""The table `run`: which stages, in which order, and what is refused."""

import pytest

from fledge.contracts.errors import ConfigError
from fledge.contracts.recipe import read_recipe
from fledge.contracts.run_settings import STAGES, RunSettings


def test_stages_come_in_the_order_of_the_road() -> None:
    settings = read_recipe({"run": {"stages": ["train", "prepare", "tokenize"]}}).run
    assert settings.ordered_stages == ("prepare", "tokenize", "train")
    assert RunSettings().ordered_stages == STAGES


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stages": []}, "stages is empty"),
        ({"stages": ["train", "train"]}, "stages names train twice"),
        ({"stages": ["trian"]}, r"run\.stages\[0\] is 'trian'"),
        ({"exports": ["vllm", "vllm"]}, "exports names vllm twice"),
        ({"exports": []}, "exports is empty"),
        ({"processes": 0}, "processes is 0"),
    ],
)
def test_what_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe({"run": table})


def test_a_road_without_exports_needs_no_formats() -> None:
    assert read_recipe({"run": {"stages": ["prepare"], "exports": []}}).run.exports == ()
