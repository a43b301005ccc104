"""From TOML to settings: strict about names and types, helpful about both."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fledge.contracts.errors import ConfigError
from fledge.contracts.toml_settings import override, read_settings, read_toml, to_plain


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Whole:
    parts: tuple[Part, ...]
    colour: Literal["red", "blue"] = "red"
    count: int = 0
    is_open: bool = False
    labels: dict[str, int] = field(default_factory=dict)
    spare: Part | None = None
    depth: Literal["auto"] | tuple[int, ...] = "auto"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError(f"count is {self.count}; it must be at least 0.")


def read(**table: Any) -> Whole:
    return read_settings(Whole, {"parts": [{"name": "a"}], **table}, where="whole")


def refusal(**table: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**table)
    return str(caught.value)


def test_every_kind_of_field_is_read() -> None:
    whole = read(
        parts=[{"name": "a", "weight": 2}, {"name": "b"}],
        colour="blue",
        count=3,
        is_open=True,
        labels={"x": 1},
        spare={"name": "c"},
    )
    assert whole == Whole(
        parts=(Part(name="a", weight=2.0), Part(name="b")),
        colour="blue",
        count=3,
        is_open=True,
        labels={"x": 1},
        spare=Part(name="c"),
    )
    assert isinstance(whole.parts[0].weight, float)


def test_plain_settings_read_back_to_the_same() -> None:
    for whole in (read(), read(spare={"name": "c"}, labels={"x": 1})):
        assert read_settings(Whole, to_plain(whole), where="whole") == whole


def test_one_value_is_a_list_of_one() -> None:
    assert read(parts={"name": "only"}).parts == (Part(name="only"),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"colur": "red"}, "whole has no setting `colur`; did you mean `colour`?"),
        ({"zzz": 1}, "whole has no setting `zzz`; known are parts, colour, count, is_open,"),
        ({"colour": "green"}, "whole.colour is 'green'; it must be one of 'red', 'blue'."),
        ({"count": "3"}, "whole.count is '3'; it must be a whole number."),
        ({"count": 3.0}, "whole.count is 3.0; it must be a whole number."),
        ({"count": True}, "whole.count is True; it must be a whole number."),
        ({"is_open": 1}, "whole.is_open is 1; it must be true or false."),
        ({"labels": [1]}, "whole.labels is [1]; it must be a table."),
        ({"labels": {"x": "y"}}, "whole.labels.x is 'y'; it must be a whole number."),
        ({"spare": "c"}, "whole.spare is 'c'; it must be a table."),
        ({"parts": [{"weight": 1}]}, "whole.parts[0] lacks `name`."),
        (
            {"parts": [{"name": "a"}, {"name": "b", "wight": 1}]},
            "whole.parts[1] has no setting `wight`; did you mean `weight`?",
        ),
        ({"parts": [{"name": 1}]}, "whole.parts[0].name is 1; it must be a text."),
        (
            {"parts": [{"name": "a", "weight": "x"}]},
            "whole.parts[0].weight is 'x'; it must be a number.",
        ),
        ({"count": -1}, "in whole: count is -1; it must be at least 0."),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], message: str) -> None:
    assert refusal(**table).startswith(message)


def test_a_word_or_a_list() -> None:
    assert read().depth == "auto"
    assert read(depth="auto").depth == "auto"
    assert read(depth=[3, 1]).depth == (3, 1)
    assert read(depth=[]).depth == ()
    assert refusal(depth="deep") == ("whole.depth is 'deep'; it must be one of 'auto', or a list.")
    assert refusal(depth=3) == "whole.depth is 3; it must be one of 'auto', or a list."
    assert refusal(depth=[1, "x"]).startswith("whole.depth[1] is 'x'; it must be ")
    assert refusal(depth=["auto"]).startswith("whole.depth[0] is 'auto'; it must be ")


def test_a_missing_setting_of_the_outermost_table() -> None:
    with pytest.raises(ConfigError, match="the recipe lacks `parts`"):
        read_settings(Whole, {}, where="")
    with pytest.raises(ConfigError, match="the recipe has no setting `part`; did you mean `parts`"):
        read_settings(Whole, {"part": 1}, where="")


def test_assignments_are_toml_or_plain_text() -> None:
    table = {"a": {"b": 1}, "list": [{"x": 1}, {"x": 2}]}
    changed = override(
        table,
        ["a.b=2.5", "a.c = true", "d=smollm2-135m", 'e=["p", "q"]', "f.g.h=0", "list.1.x=9"],
    )
    assert changed == {
        "a": {"b": 2.5, "c": True},
        "d": "smollm2-135m",
        "e": ["p", "q"],
        "f": {"g": {"h": 0}},
        "list": [{"x": 1}, {"x": 9}],
    }
    assert table == {"a": {"b": 1}, "list": [{"x": 1}, {"x": 2}]}
    assert override({"list": [1, 2]}, ["list.0=5"]) == {"list": [5, 2]}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("a.b", "--set 'a.b' is not of the form name.of.setting=value."),
        ("=1", "--set '=1' is not of the form name.of.setting=value."),
        ("a..b=1", "--set 'a..b=1' is not of the form name.of.setting=value."),
        ("a.b.c=1", "--set 'a.b.c=1': a.b is not a table of settings."),
        ("a.b.c.d=1", "--set 'a.b.c.d=1': a.b is not a table of settings."),
        ("list.2=1", "--set 'list.2=1': list is a list of 2, counted from 0; '2' is none of them."),
        ("list.x.y=1", "--set 'list.x.y=1': list is a list of 2, counted from 0; 'x' is none"),
    ],
)
def test_assignments_that_fit_nowhere(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override({"a": {"b": 1}, "list": [1, 2]}, [assignment])
    assert str(caught.value).startswith(message)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe at .*missing\.toml"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"a = \xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_toml(bad)
    bad.write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML: .*line 1"):
        read_toml(bad)
