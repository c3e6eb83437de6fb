"""Kernels compiled by Numba, and calling them from several threads.

A kernel is a function of one argument, the memory of a call: int64 numbers and addresses, of which the first two say
what is left to do:

    args[0]   the next piece of work that nobody has taken      args[1]   how many there are      args[2 ..]  the rest

Each thread takes one piece after the other (`language.claim`), so that none waits for a slow one. Threads are a `team`;
the interpreter goes on with others meanwhile.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from numba import types

from .disk import Code, kept
from .team import team_of_this_thread
from .threads import num_threads

__all__ = ["Kernel", "kernel", "words_of"]

_CALL = types.void(types.CPointer(types.int64))
_C_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FAST = {"reassoc", "contract", "nsz"}


class Kernel:
    """A compiled function of a call's memory."""

    def __init__(self, code: Code) -> None:
        self._code = code

    @property
    def address(self) -> int:
        """Of its code."""
        return self._code.address

    def __call__(self, num_pieces: int, *args: int) -> None:
        """Do `num_pieces` pieces of work, all of them when this returns. Other Python threads run meanwhile."""
        memory = (ctypes.c_int64 * (2 + len(args)))(0, num_pieces, *args)
        helpers = min(num_threads(), num_pieces) - 1
        if helpers > 0:
            team_of_this_thread().call(self.address, ctypes.addressof(memory), helpers=helpers)
        else:
            self._code.call(memory)


def kernel(*, fast: bool = True) -> Callable[[Callable[..., None]], Kernel]:
    """Compile a function now, or find it on disk. fast: sums may be taken in several lanes, and fused with products;
    NaN and infinity count as ever."""

    def compiled(function: Callable[..., None]) -> Kernel:
        return Kernel(kept(_CALL, _C_CALL, function, fastmath=_FAST if fast else set()))

    return compiled


def words_of(*values: float) -> tuple[int, ...]:
    """Float64 values as the int64 that have the same bits; see `language.bits_double`."""
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))
