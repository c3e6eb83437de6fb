"""How many threads a Python thread's kernels have, and that torch's own do not wait beside them.

Torch's threads (OpenMP's) look for their next work for some milliseconds after each operation, on the cores that
helpers of a `team` want. So where kernels do what is large, torch is left with one thread, in the Python thread that
says so.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["kernel_threads", "num_threads", "torch_threads"]

_LOCAL = threading.local()


def num_threads() -> int:
    """Threads of a kernel's call from this Python thread: those of `kernel_threads`, or as many as torch has."""
    return getattr(_LOCAL, "number", None) or torch.get_num_threads()


@contextmanager
def kernel_threads() -> Iterator[None]:
    """In this Python thread the threads of torch are the kernels', and torch has one."""
    of_torch, of_kernels = torch.get_num_threads(), getattr(_LOCAL, "number", None)
    _LOCAL.number = num_threads()
    _give_torch(1)
    try:
        yield
    finally:
        _give_torch(of_torch)
        _LOCAL.number = of_kernels


@contextmanager
def torch_threads() -> Iterator[None]:
    """Inside `kernel_threads`: for large work of torch's own."""
    before = torch.get_num_threads()
    _give_torch(num_threads())
    try:
        yield
    finally:
        _give_torch(before)


def _give_torch(number: int) -> None:
    """In this Python thread alone, which `torch.set_num_threads` does not promise; nothing where that cannot be."""
    set_threads = _openmp()
    if set_threads is not None:
        set_threads(number)


@cache
def _openmp() -> Any:
    """OpenMP's own word for it, from the library that torch has loaded; None without one."""
    try:
        set_threads = ctypes.CDLL("libgomp.so.1").omp_set_num_threads
    except (OSError, AttributeError):
        return None
    set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
    return set_threads
