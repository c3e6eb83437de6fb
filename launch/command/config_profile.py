"""--profile FILE.toml: the settings of a deployment as if they were flags, and the flags of the command line win.

    [settings]               serried generate MODEL --profile FILE --max-num-seqs 32
    max_num_seqs = 64        = serried generate MODEL --enable-eplb --max-num-seqs 32
    enable_eplb = true

Words go in and words come out, so ranks that are started as processes of their own see the same. Knows the names of
settings, not what they mean.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from runtime.settings.config import EngineConfig

from ..groups.place import GroupFlags
from .models import find_hardware

FLAG = "--profile"
ABOUT = """
--profile FILE.toml  Settings of a deployment, as serried plan writes them; flags win over it.
"""
PARTS = ("deployment", "settings")
NOT_SETTINGS = ("model", "profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Which settings were given by flags, and which by which file."""

    flags: frozenset[str] = frozenset()
    profile: Mapping[str, str] = field(default_factory=dict)


def takes_profile(flags: type[Any]) -> bool:
    """Whether a command has the settings that profiles are about."""
    return "engine" in {item.name for item in fields(flags)}


def expand_profile(words: Sequence[str], flags: type[Any]) -> tuple[list[str], Origins]:
    """`words` with the file's settings in them, and where each comes from. Without --profile they stay as they are.

    Raises ValueError for a file that is no profile, or that names what is no setting; OSError where there is none.
    """
    path, rest = _take_file(words)
    given = frozenset(_given(rest))
    if path is None:
        return rest, Origins(flags=given)
    settings = read_profile(Path(path))
    here = set(setting_names(flags))
    used = {name: value for name, value in settings.items() if name in here and name not in given}
    said = [word for name, value in used.items() for word in _words(name, value)]
    return [*rest, *said], Origins(flags=given, profile=dict.fromkeys(used, path))


def read_profile(path: Path) -> dict[str, Any]:
    """The settings of a file. ValueError names the file, the setting, and one that may have been meant."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    strangers = [name for name in data if name not in PARTS]
    if strangers or not isinstance(data.get("settings"), dict):
        wrong = f"{strangers[0]} is unknown" if strangers else "settings is missing"
        raise ValueError(f"{path}: {wrong}; a profile has [settings], e.g. max_num_seqs = 64, and [deployment]")
    known = {*setting_names(EngineConfig), *setting_names(GroupFlags)} - set(NOT_SETTINGS)
    for name, value in data["settings"].items():
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise ValueError(f"{path}: {name} is no setting" + (f"; did you mean {close[0]}?" if close else ""))
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{path}: {name} is {value!r}; it must be a number, a word, true or false")
    return data["settings"]


def setting_names(flags: type[Any]) -> Iterator[str]:
    """Names of all fields, nested ones too."""
    hints = get_type_hints(flags, include_extras=False)
    for item in fields(flags):
        inner = next((each for each in (hints[item.name], *get_args(hints[item.name])) if is_dataclass(each)), None)
        if inner is None:
            yield item.name
        else:
            yield from setting_names(inner)  # type: ignore[arg-type]  # a class, by the annotation


def setting_words(name: str, value: Any) -> list[str]:
    """A setting as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _words(name: str, value: Any) -> list[str]:
    """As flags; a device may be said by its name, whatever folder the command is started in."""
    if name == "hardware" and not Path(str(value)).exists():
        value = find_hardware(str(value))
    return setting_words(name, value)


def _take_file(words: Sequence[str]) -> tuple[str | None, list[str]]:
    path, rest, pending = None, [], iter(words)
    for word in pending:
        if word == FLAG:
            path = next(pending, "")
        elif word.startswith(f"{FLAG}="):
            path = word.removeprefix(f"{FLAG}=")
        else:
            rest.append(word)
    if path == "":
        raise ValueError(f"{FLAG} needs a file, e.g. profiles/deploy/v3-h200-32.toml")
    return path, rest


def _given(words: Sequence[str]) -> Iterator[str]:
    """Names of settings that the words set."""
    for word in words:
        if word.startswith("--"):
            name = word[2:].split("=")[0].replace("-", "_")
            yield name.removeprefix("no_") if name.startswith("no_") else name
