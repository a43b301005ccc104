"""From TOML to frozen dataclasses, strictly: an unknown key or a wrong type is an error.

    settings = read_settings(PrepareSettings, table, where="prepare")

Supported field types: str, int, float, bool, Any, Literal, X | None, tuple[X, ...], dict[str, X],
and other dataclasses; `X | tuple[Y, ...]` takes a list as the tuple. A dataclass checks its own
values in `__post_init__`.
"""

import copy
import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fledge.contracts.errors import ConfigError

T = TypeVar("T")

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no recipe at {path}.") from error
    except OSError as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe {path} is not UTF-8 text: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the recipe {path} is not valid TOML: {error}.") from error


def override(table: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy with `a.b=value` put in; values are TOML, or plain text where they are none.

    An entry of a list is named by its number: `prepare.sources.0.max_rows=100`.
    """
    result = copy.deepcopy(table)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        parts = [part.strip() for part in name.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"--set {assignment!r} is not of the form name.of.setting=value.")
        place: Any = result
        for depth, part in enumerate(parts[:-1]):
            place = _below(place, part, ".".join(parts[:depth]), assignment)
        _put(place, parts[-1], _toml_value(text.strip()), ".".join(parts[:-1]), assignment)
    return result


def _below(place: Any, part: str, name: str, assignment: str) -> Any:
    """The table or array called `part`, made when it is missing; arrays count from 0."""
    if isinstance(place, list):
        return place[_index(place, part, name, assignment)]
    if isinstance(place, dict):
        return place.setdefault(part, {})
    raise ConfigError(f"--set {assignment!r}: {name} is not a table of settings.")


def _put(place: Any, part: str, value: Any, name: str, assignment: str) -> None:
    if isinstance(place, list):
        place[_index(place, part, name, assignment)] = value
    elif isinstance(place, dict):
        place[part] = value
    else:
        raise ConfigError(f"--set {assignment!r}: {name} is not a table of settings.")


def _index(array: list[Any], part: str, name: str, assignment: str) -> int:
    if not (part.isascii() and part.isdecimal() and int(part) < len(array)):
        raise ConfigError(
            f"--set {assignment!r}: {name} is a list of {len(array)}, counted from 0; "
            f"{part!r} is none of them."
        )
    return int(part)


def read_settings(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """Build a settings dataclass; `where` names the table in errors."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(_unknown(key, where, list(fields)))
    values = {
        key: _convert(value, hints[key], f"{where}.{key}" if where else key)
        for key, value in table.items()
    }
    for name, one in fields.items():
        required = one.default is dataclasses.MISSING and (
            one.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise ConfigError(f"{where or 'the recipe'} lacks `{name}`.")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"in {where or 'the recipe'}: {error}") from error


def read_value(hint: Any, value: Any, *, where: str) -> Any:
    """One value as a field of this type takes it; `where` names it in errors."""
    return _convert(value, hint, where)


def to_plain(settings: Any) -> Any:
    """Settings as JSON and TOML know them: dictionaries, lists, texts, numbers."""
    if dataclasses.is_dataclass(settings):
        return {f.name: to_plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    if isinstance(settings, tuple | list):
        return [to_plain(value) for value in settings]
    if isinstance(settings, dict):
        return {key: to_plain(value) for key, value in settings.items()}
    return settings


def _unknown(key: str, where: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}."
    return f"{where or 'the recipe'} has no setting `{key}`; {hint}"


def _convert(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [one for one in arguments if one is not type(None)]
        lists = [one for one in choices if typing.get_origin(one) is tuple]
        if lists and isinstance(value, list):
            return _convert(value, lists[0], where)
        try:
            return _convert(value, choices[0], where)
        except ConfigError as error:
            if not lists:
                raise
            raise ConfigError(f"{str(error).removesuffix('.')}, or a list.") from error
    if origin is typing.Literal:
        if value not in arguments:
            known = ", ".join(map(repr, arguments))
            raise ConfigError(f"{where} is {value!r}; it must be one of {known}.")
        return value
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        _require(isinstance(value, dict), value, where, "a table")
        return {key: _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        _require(isinstance(value, dict), value, where, "a table")
        return read_settings(typing.cast(type[Any], hint), value, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_right = isinstance(value, hint) and not (hint is not bool and isinstance(value, bool))
    _require(is_right, value, where, _NAMES.get(hint, hint.__name__))
    return value


def _require(condition: bool, value: Any, where: str, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{where} is {value!r}; it must be {wanted}.")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
