"""Threads that help with a call, without the interpreter and without waiting for each other.

The caller opens a call, does its work like everybody else, and closes it. Only who has begun a piece by then is waited
for: a helper that the operating system keeps from running is not missed, which a barrier of all would be.

    caller   | open(3) | piece 0 | piece 2 | piece 3 | close, wait for helper 1      |
    helper 1 |     sees 3 | piece 1                        |
    helper 2 |                                                sees 3, closed: nothing |

Between calls helpers look for the next one for a short while and then sleep on a semaphore. Each Python thread that
calls has a team of its own, which ends with it; what calls are made of is in `calls`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .disk import Code, kept
from .language import add, declared, load, store

__all__ = ["Team", "team_of_this_thread"]

_NUMBER, _OPEN, _FUNCTION, _ARGS, _INSIDE, _SLEEPING, _SEMAPHORE = (64 * place for place in range(7))
"""Bytes into a team's memory, each on a cache line of its own: the last call's number; the same while it is open, else
0; what to call with what; helpers that may be in it; helpers that sleep or are about to; what they sleep on."""
_END = -1
"""The number that no call has: helpers return."""
_LOOKS = 4000
"""At the number before a helper sleeps: about 0.1 ms, more than lies between two calls of a step."""


@intrinsic
def _call(_typing, _function, _args):
    def generate(context, builder, _signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _pause(_typing):
    def generate(context, builder, _signature, _args):
        if builder.module.triple.startswith("x86_64"):
            builder.call(declared(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), generate


_call_at: Any = _call
"""_call_at(function, args): both addresses."""
_rest: Any = _pause
"""Let the other half of the core compute for a moment."""
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_C = ctypes.CDLL(None)


def _help(team):
    """A helper's life."""
    seen = 0
    while True:
        looks = 0
        number = load(team + _NUMBER)
        while number == seen:
            if looks < _LOOKS:
                looks += 1
                _rest()
            else:
                add(team + _SLEEPING, 1)
                if load(team + _NUMBER) == seen:
                    _sem_wait(team + _SEMAPHORE)
                add(team + _SLEEPING, -1)
            number = load(team + _NUMBER)
        seen = number
        if seen == _END:
            return 0
        add(team + _INSIDE, 1)
        if load(team + _OPEN) == seen:
            _call_at(load(team + _FUNCTION), load(team + _ARGS))
        add(team + _INSIDE, -1)


@njit(error_model="numpy")
def _tell(team, number):
    store(team + _NUMBER, number)
    for _ in range(load(team + _SLEEPING)):
        _sem_post(team + _SEMAPHORE)


def _end(team):
    """No call follows."""
    _tell(team, _END)
    return 0


def _lead(team, function, args):
    """The caller's part of a call."""
    number = load(team + _NUMBER) + 1
    store(team + _FUNCTION, function)
    store(team + _ARGS, args)
    store(team + _OPEN, number)
    _tell(team, number)
    _call_at(function, args)
    store(team + _OPEN, 0)
    looks = 0
    while load(team + _INSIDE) != 0:
        looks += 1
        _rest()
        if looks > _LOOKS:
            _sched_yield()
    return 0


_I64 = types.int64


def _in_c(function: Any, num_args: int) -> Code:
    words = num_args * [ctypes.c_int64]
    return kept(_I64(*num_args * [_I64]), ctypes.CFUNCTYPE(ctypes.c_int64, *words), function)


_HELP, _LEAD, _FINISH = _in_c(_help, 1), _in_c(_lead, 3), _in_c(_end, 1)
_MEMORY: list[Any] = []
"""Of all teams: helpers look at it until they notice that theirs has ended, so that none is given back."""
_LOCAL = threading.local()


def _forget() -> None:
    """Helpers stay with the parent: a forked child starts its own."""
    _LOCAL.__dict__.clear()


os.register_at_fork(after_in_child=_forget)


class Team:
    """The helpers of one Python thread."""

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(_SEMAPHORE + 128)
        _MEMORY.append(memory)
        start = ctypes.addressof(memory)
        self._address = start + -start % 64
        self._helpers = 0
        _C.sem_init(ctypes.c_void_p(self._address + _SEMAPHORE), 0, 0)
        weakref.finalize(self, _FINISH.call, self._address)

    def call(self, function: int, args: int, *, helpers: int) -> None:
        """A compiled function of one address, by this thread and so many others. It must not matter who does what.
        OSError if there can be no such threads."""
        while self._helpers < helpers:
            self._start()
        _LEAD.call(self._address, function, args)

    @property
    def num_sleeping(self) -> int:
        """Helpers that sleep, or are about to."""
        return ctypes.c_int64.from_address(self._address + _SLEEPING).value

    def _start(self) -> None:
        thread = ctypes.c_ulong()
        given = (ctypes.c_void_p(_HELP.address), ctypes.c_void_p(self._address))
        fault = _C.pthread_create(ctypes.byref(thread), None, *given)
        if fault:
            raise OSError(fault, "no thread for a team of kernels: raise the limit of threads, or set cpu_threads to 1")
        self._helpers += 1
        _C.pthread_detach(thread)


def team_of_this_thread() -> Team:
    """Made when it is first asked for."""
    team = getattr(_LOCAL, "team", None)
    if team is None:
        team = _LOCAL.team = Team()
    return team
