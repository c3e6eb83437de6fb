"""Compiled code, kept on disk for the next start: under a name that changes with the sources that it came from."""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba

__all__ = ["kept", "note"]

_SPENT_S: list[float] = []


def kept(signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """The function as C calls it (`numba.cfunc`): found on disk, or compiled now and kept where that can be."""
    begin, folder = time.monotonic(), _folder(Path(function.__code__.co_filename))
    settings: Any = import_module("numba.core.config")
    with _one_at_a_time(folder):
        before, settings.CACHE_DIR = settings.CACHE_DIR, folder or ""
        try:
            return numba.cfunc(signature, cache=folder is not None, error_model="numpy", **options)(function)
        finally:
            settings.CACHE_DIR = before
            _SPENT_S.append(time.monotonic() - begin)


@contextmanager
def _one_at_a_time(folder: str | None) -> Iterator[None]:
    """The ranks of a node start together: one compiles, and others find what it left. Who ends lets go."""
    with ExitStack() as held:
        if folder is not None:
            lock = held.enter_context(open(Path(folder) / "lock", "w"))
            with suppress(OSError):  # a file system without locks: everybody compiles
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def note() -> str | None:
    """What to say of a start that compiled more than a second; None of another."""
    seconds = sum(_SPENT_S)
    if seconds < 1:
        return None
    kept_where = (
        "and are kept for the next start" if _folder(Path(__file__)) else "for no folder for them can be written"
    )
    return f"kernels were compiled for this processor in {seconds:.0f} s, {kept_where}"


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
