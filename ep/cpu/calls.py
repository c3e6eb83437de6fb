"""Kernels compiled by Numba, and calling them from as many threads as torch may use.

A kernel is a function of one argument, the memory of a call: int64 numbers and addresses, of which the first two say
what is left to do:

    args[0]   the next piece of work that nobody has taken      args[1]   how many there are      args[2 ..]  the rest

Each thread takes one piece after the other (`pieces` in `language.claim`), so that none waits for a slow one. The
threads are those of torch's own operations, OpenMP's team, and they come and go without the interpreter. What was
compiled is kept on disk, under a name that changes with the sources.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import torch
from numba import types

__all__ = ["Kernel", "kernel", "words_of"]

_CALL = types.void(types.CPointer(types.int64))


class Kernel:
    """A compiled function of a call's memory."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # kept: its code lives as long as it does
        self._address = ctypes.c_void_p(compiled.address)
        self._alone = compiled.ctypes

    def __call__(self, num_pieces: int, *args: int) -> None:
        """Do `num_pieces` pieces of work, all of them when this returns. Other Python threads run meanwhile."""
        memory = (ctypes.c_int64 * (2 + len(args)))(0, num_pieces, *args)
        threads = min(torch.get_num_threads(), num_pieces)
        team = _team()
        if threads <= 1 or team is None:
            self._alone(memory)
        else:
            team(self._address, memory, threads, 0)


def kernel(function: Callable[..., None]) -> Kernel:
    """Compile it now, or find it on disk."""
    settings: Any = import_module("numba.core.config")
    before, settings.CACHE_DIR = settings.CACHE_DIR, _folder(Path(function.__code__.co_filename))
    try:
        return Kernel(numba.cfunc(_CALL, cache=True, error_model="numpy", fastmath=_FAST)(function))
    finally:
        settings.CACHE_DIR = before


def words_of(*values: float) -> tuple[int, ...]:
    """Float64 values as the int64 that have the same bits; see `language.bits_double`."""
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))


_FAST = {"reassoc", "contract", "nsz"}
"""Sums may be taken in several lanes; NaN and infinity count as ever."""


@cache
def _folder(source: Path) -> str:
    """Where code compiled from this file is kept: it calls what lies in this folder, too."""
    digest = hashlib.sha256()
    for file in (source, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(file.read_bytes())
    return str(Path.home() / ".cache" / "serried" / "kernels" / digest.hexdigest()[:16])


@cache
def _team() -> Any:
    """OpenMP's way to run a function by a team of threads, from the library that torch has loaded; None without one."""
    try:
        run = ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run
