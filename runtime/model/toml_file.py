"""TOML from a file that anybody may have written: a table, or a refusal in words, never a traceback.

What `tomllib` itself raises is of several kinds, one of them no ValueError; here all are one. Does not know what a file
is for.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_toml(file: Path) -> dict[str, Any]:
    """The table in a file. Raises ValueError that begins with the file's name; OSError when it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file} is not valid TOML: it is nested too deeply") from error
    except ValueError as error:  # of the text, of its encoding, or of a number without end
        raise ValueError(f"{file} is not valid TOML: {error}") from error
