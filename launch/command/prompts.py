"""Prompts as the command line and JSON-lines files give them, and what each asks of the sampler.

A line of a file is one object: `prompt` (text) or `prompt_token_ids`, optionally `id` and `priority`, and any sampling
field; fields that a line leaves out come from the command line. What is let in is text that can be written as UTF-8.
Does not know tokenizers or the engine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime import SamplingParams

OWN_FIELDS = ("prompt", "prompt_token_ids", "id", "priority")
SHOWN = 60
SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request before it is tokenised: exactly one of `text` and `token_ids` is set."""

    id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams
    priority: int = 0
    origin: str
    """Where it was written, for error messages: `--prompt 2`, or `file.jsonl:7`."""


def gather_prompts(texts: Sequence[str], file: Path | None, params: SamplingParams) -> list[Prompt]:
    """All prompts in input order: `texts` first, then the lines of `file`; ids default to the place in that order.

    Raises ValueError naming the origin and the field of whatever is wrong, and when there is no prompt at all.
    """
    prompts = [
        Prompt(id=str(index), text=_typed_in(text, origin := f"--prompt {index + 1}"), params=params, origin=origin)
        for index, text in enumerate(texts)
    ]
    if file is not None:
        # Bytes that are no UTF-8 come through as surrogates, so that their line can be named. A mark of byte order at
        # the start, as some editors write it, is no text.
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            prompts += parse_lines(lines, name=str(file), params=params, first_index=len(prompts))
    if not prompts:
        raise ValueError(
            "there is nothing to decode: give --prompt TEXT, or --prompts FILE with one JSON object a line"
        )
    _check_ids(prompts)
    return prompts


def parse_lines(lines: Iterable[str], *, name: str, params: SamplingParams, first_index: int = 0) -> list[Prompt]:
    """The prompts of a JSON-lines file called `name`; empty lines are skipped. Raises ValueError with `name:line`."""
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_parse(line, f"{name}:{number}", params, str(first_index + len(prompts))))
    return prompts


def _typed_in(text: str, origin: str) -> str:
    """A prompt of the command line. Its bytes are read as UTF-8 where the locale could not read them."""
    if SURROGATE.search(text) is None:
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise _not_utf8(text, origin) from error


def _not_utf8(text: str, origin: str) -> ValueError:
    """What to raise for `text` with surrogates, U+DC80 to U+DCFF, which stand for bytes that could not be read."""
    found = SURROGATE.search(text)
    assert found is not None, f"{_short(ascii(text))} has no surrogates"
    return ValueError(f"{origin}: not UTF-8 text: byte 0x{ord(found[0]) & 0xFF:02x} as character {found.end()}")


def _parse(line: str, origin: str, params: SamplingParams, default_id: str) -> Prompt:
    if SURROGATE.search(line):
        raise _not_utf8(line, origin)
    fields = _fields(line, origin)
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise ValueError(f"{origin}: give either prompt or prompt_token_ids, and not both")
    return Prompt(
        id=_text(fields, "id", default_id, origin),
        text=_text(fields, "prompt", None, origin),
        token_ids=None if token_ids is None else _token_ids(token_ids, origin),
        params=_params(fields, params, origin),
        priority=_typed(fields, "priority", int, 0, origin),
        origin=origin,
    )


class _Twice(ValueError):
    """An object has this key twice."""


def _fields(line: str, origin: str) -> dict[str, Any]:
    """The object of one line, whose keys differ. Raises ValueError in words for whatever else the line is."""
    try:
        fields = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{origin}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError(f"{origin}: brackets are nested too deeply; no field needs more than one pair") from error
    except _Twice as error:
        raise ValueError(f"{origin}: {error} is given twice; which one is meant?") from error
    except ValueError as error:  # Python refuses to read an integer of more than 4300 digits
        raise ValueError(f"{origin}: a number has more digits than any field takes") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{origin}: a line must be a JSON object, e.g. {{"prompt": "Hello"}}')
    return fields


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(_shown(key))
        found[key] = value
    return found


def _shown(value: Any) -> str:
    """A value as a message may carry it: in one line, and short whatever it is."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return _short(json.dumps(value))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _text(fields: Mapping[str, Any], name: str, default: str | None, origin: str) -> Any:
    """A field of text. JSON can spell half of a surrogate pair, which no tokenizer reads and no output can carry."""
    value = _typed(fields, name, str, default, origin)
    found = SURROGATE.search(value or "")
    if found is not None:
        raise ValueError(
            f"{origin}: {name} has \\u{ord(found[0]):04x} as character {found.end()}, half of a surrogate pair and no "
            "character; write both halves, e.g. \\ud83d\\ude00, or the character itself"
        )
    return value


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any, origin: str) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        example = {str: '"a"', int: "0"}[kind]
        raise ValueError(f"{origin}: {name} is {_shown(value)}; it must be {_called(kind)}, e.g. {example}")
    return value


def _called(kind: type) -> str:
    return {str: "a string", int: "a whole number"}[kind]


def _token_ids(value: Any, origin: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{origin}: prompt_token_ids must be a list of whole numbers, e.g. [1, 2]")
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{origin}: prompt_token_ids[{index}] is {_shown(token)}; it must be a whole number")
    return tuple(value)


def _params(fields: Mapping[str, Any], params: SamplingParams, origin: str) -> SamplingParams:
    own = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
    if not own:
        return params
    try:
        return SamplingParams.from_dict(asdict(params) | own)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _check_ids(prompts: Sequence[Prompt]) -> None:
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            shown = _short(repr(prompt.id))
            raise ValueError(f"{prompt.origin}: id {shown} is taken by {seen[prompt.id]}; ids must differ")
        seen[prompt.id] = prompt.origin
