"""Typed reads of a JSON object in a file that somebody else may have written."""

import sys
from collections.abc import Callable
from typing import Any

from fledge.contracts.errors import ArtifactError


class Fields:
    """Typed reads of one JSON object; null means absent, and a wrong type is never guessed at."""

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self._where, self._prefix = where, prefix

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; it must be there unless there is a default."""
        if default is not None and self.values.get(key) is None:
            return default
        size: int = self._checked(key, _is_size, "a positive whole number")
        return size

    def number(self, key: str, default: float) -> float:
        if self.values.get(key) is None:
            return default
        return float(self._checked(key, _is_positive_number, "a positive finite number"))

    def flag(self, key: str, default: bool) -> bool:
        if self.values.get(key) is None:
            return default
        flag: bool = self._checked(key, _is_flag, "true or false")
        return flag

    def text(self, key: str) -> str | None:
        if self.values.get(key) is None:
            return None
        text: str = self._checked(key, _is_text, "a string")
        return text

    def texts(self, key: str) -> list[str]:
        if self.values.get(key) is None:
            return []
        texts: list[str] = self._checked(key, _is_list_of(_is_text), "a list of strings")
        return texts

    def layers(self, key: str) -> tuple[int, ...]:
        if self.values.get(key) is None:
            return ()
        need = "a list of whole numbers from 0"
        return tuple(self._checked(key, _is_list_of(_is_layer), need))

    def object(self, key: str) -> "Fields":
        if self.values.get(key) is None:
            return Fields({}, self._where)
        values = self._checked(key, _is_object, "an object")
        return Fields(values, self._where, f"{self._prefix}{key}.")

    def mapped(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "Fields":
        """The same object with other values, still called by its own name in errors."""
        return Fields(change(self.values), self._where, self._prefix)

    def _checked(self, key: str, fits: Callable[[Any], bool], need: str) -> Any:
        value = self.values.get(key)
        if not fits(value):
            raise ArtifactError(
                f"{self._where}: {self._prefix}{key} is {value!r}; {need} is needed."
            )
        return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_layer(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_positive_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and 0 < value <= sys.float_info.max


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))
