"""JSON from a file that anybody may have written: an object, or a refusal in words, never a traceback.

What `json` itself raises is of four kinds, one of them no ValueError; here all are one. Does not know what a file is
for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .config_fields import shown


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError that begins with the file's name; OSError when it cannot be read."""
    try:
        data = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds {type(data).__name__}; it must hold an object")  # noqa: TRY004
    return data


def parse_json(text: bytes) -> Any:
    """What UTF-8 text says. ValueError when it is no JSON, is nested too deeply, or gives one key two values."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Other readers take the last of two values; here a file that says two things is refused."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            raise ValueError(f"{shown(name)} stands there twice, as {shown(found[name])} and as {shown(value)}")
        found[name] = value
    return found
