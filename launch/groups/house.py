"""Do the seven rooms come from one folder? Asked before any of them is imported.

The rooms have short names (`moe`, `runtime`) that another installed package may carry too. If one did, half of the
program would be somebody else's, and what follows would be a baffling traceback. Knows where Python would import each
room from; imports none of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOMS = ("ep", "attention_mla", "moe", "eplb", "dbo", "runtime", "launch")


def room_folders() -> dict[str, Path | None]:
    """The folder that each room would be imported from; None where Python finds no such package."""
    return {room: _folder(room) for room in ROOMS}


def house_fault(folders: dict[str, Path | None], *, home: Path) -> str | None:
    """What is wrong with `folders`, in words; None when every room is a folder of `home` with the room's name."""
    missing = [room for room, folder in folders.items() if folder is None]
    if missing:
        return (
            f"{_listed(missing)} cannot be imported, but belongs beside the other rooms in {home}; "
            "install again with: pip install -e ."
        )
    strangers = [f"{room} from {folder}" for room, folder in folders.items() if folder != home / room]
    if strangers:
        return (
            f"the seven rooms must come from one folder ({home}), but Python would import {_listed(strangers)}; "
            "another package carries the same name: uninstall it, or use a virtual environment of its own"
        )
    return None


def home() -> Path:
    """The folder that this room lies in, and that the others must lie in too."""
    return Path(__file__).resolve().parents[2]


def _folder(room: str) -> Path | None:
    spec = find_spec(room)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    return Path(places[0]).resolve()


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
