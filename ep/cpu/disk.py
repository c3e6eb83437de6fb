"""Compiled code, kept on disk for the next start: under a name that changes with the sources that it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numba

__all__ = ["kept"]


def kept(signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """The function as C calls it (`numba.cfunc`): found on disk, or compiled now and kept where that can be."""
    settings: Any = import_module("numba.core.config")
    before, settings.CACHE_DIR = settings.CACHE_DIR, _folder(Path(function.__code__.co_filename))
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy", **options)(function)
    finally:
        settings.CACHE_DIR = before


@cache
def _folder(source: Path) -> str:
    """Of code from this file, which calls what lies in this folder, too."""
    digest = hashlib.sha256()
    for file in (source, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(file.read_bytes())
    return str(Path.home() / ".cache" / "serried" / "kernels" / digest.hexdigest()[:16])
