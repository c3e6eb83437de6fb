"""Which file or folder a MODEL or GPU on the command line means: a path, or a name under `profiles/`.

Knows where `profiles/` lies in a checkout; does not read what it finds.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from ..groups.house import home

PROFILES = home() / "profiles"


def find_model(name: str) -> Path:
    """The folder or `.json` file called `name`, or else the one of that name in `profiles/models`.

    Raises ValueError listing the names there are.
    """
    path = Path(name)
    if path.exists():
        return path
    return _profile(name, PROFILES / "models", suffix=".json", what="a folder or file, nor a model")


def find_hardware(name: str) -> Path:
    """The file of `profiles/hardware` called `name`. Raises ValueError listing the names there are."""
    return _profile(name, PROFILES / "hardware", suffix=".toml", what="a device")


def _profile(name: str, folder: Path, *, suffix: str, what: str) -> Path:
    known = {path.stem: path for path in sorted(folder.glob(f"*{suffix}"))}
    known |= {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none, outside a checkout'}"
    raise ValueError(f"{name!r} is not {what} in profiles/{folder.name}; {hint}")
