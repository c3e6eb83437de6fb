"""Compiled code, kept on disk for the next start: machine code and nothing else, so that nothing is unpickled.

A file holds the name of a function and, after a line's end, the object file that has it. It lies under a name that
changes with the sources that the code came from, the processor, and the versions of what compiled it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

__all__ = ["Code", "kept", "note"]

_SPENT_S: list[float] = []


class Code:
    """A function as C calls it. It stays in memory to the end of the process, for a team's helpers may be in it."""

    def __init__(self, name: str, machine_code: bytes, call: Any) -> None:
        rtsys.initialize(cpu_target.target_context)  # what code asks for memory with
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
        engine.finalize_object()
        self.address: int = engine.get_function_address(name)
        self.call = call(self.address)
        engine.detach()


def kept(signature: Any, call: Any, function: Callable[..., Any], **options: Any) -> Code:
    """The function compiled for C: found on disk, or compiled now and kept where that can be. The signature is
    Numba's, `call` the same in the words of ctypes. What closes over something is compiled anew."""
    begin, folder = time.monotonic(), _folder(Path(function.__code__.co_filename))
    try:
        if folder is None or function.__closure__:
            return Code(*_compiled(signature, function, options), call)
        file = Path(folder) / f"{function.__qualname__}-{function.__code__.co_firstlineno}"
        with _one_at_a_time(folder):
            if not file.exists():
                _write(file, *_compiled(signature, function, options))
            name, _, machine_code = file.read_bytes().partition(b"\n")
        return Code(name.decode(), machine_code, call)
    finally:
        _SPENT_S.append(time.monotonic() - begin)


def note() -> str | None:
    """What to say of a start that compiled more than a second; None of another."""
    seconds = sum(_SPENT_S)
    if seconds < 1:
        return None
    why = "and are kept for the next start" if _folder(Path(__file__)) else "for no folder for them can be written"
    return f"kernels were compiled for this processor in {seconds:.0f} s, {why}"


def _compiled(signature: Any, function: Callable[..., Any], options: dict[str, Any]) -> tuple[str, bytes]:
    """(name, machine code)"""
    compiled = numba.cfunc(signature, error_model="numpy", **options)(function)
    return compiled.native_name, _machine().emit_object(llvm.parse_assembly(compiled.inspect_llvm()))


def _write(file: Path, name: str, machine_code: bytes) -> None:
    """Under its own name only when it is whole."""
    with NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(name.encode() + b"\n" + machine_code)
    os.replace(part.name, file)


@contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """The ranks of a node start together: one compiles, and others find what it left. Who ends lets go."""
    with ExitStack() as held:
        lock = held.enter_context(open(Path(folder) / "lock", "w"))
        with suppress(OSError):  # a file system without locks: everybody compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _machine() -> Any:
    """This processor, as LLVM compiles for it; a new one each time, for an engine takes it with it when it ends."""
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault", jit=True
    )


@cache
def _folder(source: Path) -> str | None:
    """Of code from this file, which calls what lies in this folder, too; None where nobody may write."""
    digest = hashlib.sha256()
    for file in (source, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(file.read_bytes())
    machine = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    digest.update(repr((machine, numba.__version__, llvmlite.__version__)).encode())
    try:
        folder = Path.home() / ".cache" / "serried" / "kernels" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # no home
        return None
