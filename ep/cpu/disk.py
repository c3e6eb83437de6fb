"""Compiled code, kept on disk for the next start: under a name that changes with the sources that it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba

__all__ = ["kept"]


def kept(signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """The function as C calls it (`numba.cfunc`): found on disk, or compiled now and kept where that can be."""
    folder = _folder(Path(function.__code__.co_filename))
    settings: Any = import_module("numba.core.config")
    before, settings.CACHE_DIR = settings.CACHE_DIR, folder or ""
    try:
        return numba.cfunc(signature, cache=folder is not None, error_model="numpy", **options)(function)
    finally:
        settings.CACHE_DIR = before


@cache
def _folder(source: Path) -> str | None:
    """Of code from this file, which calls what lies in this folder, too; None where nobody may write."""
    digest = hashlib.sha256()
    for file in (source, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(file.read_bytes())
    try:
        folder = Path.home() / ".cache" / "serried" / "kernels" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # no home
        return None
