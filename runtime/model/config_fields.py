"""Reading one JSON object field by field: types and ranges are checked, and what nobody asked for is remembered.

A `Fields` knows names, values and the defaults of the model's class; it does not know what a field means.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeVar

Choice = TypeVar("Choice", bound=str)
_ABSENT = object()

LARGEST_SIZE = 1 << 20
"""What a whole number is at most unless its reader says otherwise: far past the sizes of any published model."""
_LARGEST_NUMBER = 1e12

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = 60
_MOST_SHOWN = 100


def shown(value: object) -> str:
    """A value as an error says it: its repr, cut to 100 characters however long or deep it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def refuse(field: str, value: object, rule: str) -> NoReturn:
    """Raise the one kind of error a configuration gives: the field, its value, and the rule with what is allowed."""
    raise ValueError(f"{field} is {shown(value)}; {rule}")


class Fields:
    """The fields of one JSON object; `where` is put before every name in an error, e.g. "text_config."."""

    def __init__(self, data: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, where: str = "") -> None:
        self._data = data
        self._defaults = defaults or {}
        self._where = where
        self._asked: set[str] = set()

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise ValueError about the field `name` and the value it has."""
        refuse(self.full_name(name), self.get(name, None), rule)

    def full_name(self, name: str) -> str:
        """The name as it stands in the file."""
        return f"{self._where}{name}"

    def has(self, name: str) -> bool:
        """True if the file itself states the field, be it null."""
        return name in self._data

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        """The file's value, else `default`, else what the model's class means; ValueError when there is neither."""
        self._asked.add(name)
        if name in self._data:
            return self._data[name]
        if default is not _ABSENT:
            return default
        if name in self._defaults:
            return self._defaults[name]
        raise ValueError(f"{self.full_name(name)} is missing; the file must state it")

    def integer(self, name: str, default: Any = _ABSENT, *, low: int = 1, high: int = LARGEST_SIZE) -> int:
        """A whole number from `low` to `high`; 4096.0 counts as one."""
        value = self.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.refuse(name, f"it must be a whole number of at least {low}, e.g. {max(low, 1)}")
        if value > high:
            self.refuse(name, f"it must be at most {high}, e.g. {high}")
        return value

    def integer_or_none(
        self, name: str, default: Any = _ABSENT, *, low: int = 1, high: int = LARGEST_SIZE
    ) -> int | None:
        """A whole number from `low` to `high`, or null."""
        return None if self.get(name, default) is None else self.integer(name, default, low=low, high=high)

    def number(self, name: str, default: Any = _ABSENT, *, above: float = 0.0, high: float = _LARGEST_NUMBER) -> float:
        """A number greater than `above` and at most `high`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > above:
            self.refuse(name, f"it must be a number above {above:g}, e.g. {above + 1:g}")
        if value > high:
            self.refuse(name, f"it must be at most {high:g}, e.g. {min(above + 1, high):g}")
        return float(value)

    def boolean(self, name: str, default: Any = _ABSENT) -> bool:
        """true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "it must be true or false")
        return value

    def choice(self, name: str, allowed: Collection[Choice], default: Any = _ABSENT) -> Choice:
        """One of the `allowed` words."""
        value = self.get(name, default)
        if value not in allowed:
            self.refuse(name, f"what is built is {', '.join(map(repr, allowed))}")
        return next(word for word in allowed if word == value)

    def require(self, name: str, expected: object, why: str, *, default: Any = _ABSENT) -> None:
        """The field must have the one value that is implemented."""
        value = self.get(name, expected if default is _ABSENT else default)
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            self.refuse(name, f"{why}; it must be {json.dumps(expected)}")

    def unread(self, harmless: Collection[str] = ()) -> list[str]:
        """Names in the file that nobody asked for and that are not known to be harmless."""
        return [self.full_name(name) for name in self._data if name not in self._asked and name not in harmless]
