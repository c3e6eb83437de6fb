"""Prompts as the command line and JSON-lines files give them, and what each asks of the sampler.

A line of a file is one object: `prompt` (text) or `prompt_token_ids`, optionally `id` and `priority`, and any sampling
field; fields that a line leaves out come from the command line. Does not know tokenizers or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime import SamplingParams

OWN_FIELDS = ("prompt", "prompt_token_ids", "id", "priority")


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
        Prompt(id=str(index), text=text, params=params, origin=f"--prompt {index + 1}")
        for index, text in enumerate(texts)
    ]
    if file is not None:
        with file.open(encoding="utf-8") as lines:
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
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_parse(line, f"{name}:{number}", params, str(first_index + len(prompts))))
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error
    return prompts


def _parse(line: str, origin: str, params: SamplingParams, default_id: str) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{origin}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{origin}: a line must be a JSON object, e.g. {{"prompt": "Hello"}}')
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise ValueError(f"{origin}: give either prompt or prompt_token_ids, and not both")
    return Prompt(
        id=_typed(fields, "id", str, default_id, origin),
        text=_typed(fields, "prompt", str, None, origin),
        token_ids=None if token_ids is None else _token_ids(token_ids, origin),
        params=_params(fields, params, origin),
        priority=_typed(fields, "priority", int, 0, origin),
        origin=origin,
    )


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any, origin: str) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        example = {str: '"a"', int: "0"}[kind]
        raise ValueError(f"{origin}: {name} is {json.dumps(value)}; it must be {_called(kind)}, e.g. {example}")
    return value


def _called(kind: type) -> str:
    return {str: "a string", int: "a whole number"}[kind]


def _token_ids(value: Any, origin: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{origin}: prompt_token_ids must be a list of whole numbers, e.g. [1, 2]")
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{origin}: prompt_token_ids[{index}] is {json.dumps(token)}; it must be a whole number")
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
            raise ValueError(f"{prompt.origin}: id {prompt.id!r} is taken by {seen[prompt.id]}; ids must differ")
        seen[prompt.id] = prompt.origin
