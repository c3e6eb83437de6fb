"""Starts a program on some of the rooms' modules without the rooms' own `__init__`, hence without torch.

A process beside every rank must be small and up at once; importing `runtime` costs seconds and hundreds of megabytes.
So `ep` and `runtime` are put into `sys.modules` as bare packages: `runtime.failure.board` is
then the module alone, with what it imports itself. Works for modules that stay with the standard library and
`ep.errors`.
"""

from __future__ import annotations

import sys
from pathlib import Path

BARE_ROOMS = """\
import sys, types
for room in ("ep", "runtime"):
    package = sys.modules[room] = types.ModuleType(room)
    package.__path__ = [sys.argv[1] + "/" + room]
"""
"""Code that makes the rooms bare; `sys.argv[1]` is the folder they lie in."""

_CALL_MAIN = """\
import importlib
importlib.import_module(sys.argv[2]).main(sys.argv[3:])
"""

ROOT = str(Path(__file__).resolve().parents[2])


def bare_command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main(arguments)` of `module`, for example "runtime.failure.pulse_process"."""
    return [sys.executable, "-I", "-S", "-c", BARE_ROOMS + _CALL_MAIN, ROOT, module, *arguments]


def bare_script(path: str | Path, *arguments: str) -> list[str]:
    """The command line that runs a file as `__main__` in the same surroundings, with `arguments` in `sys.argv[1:]`."""
    run = f"import runpy\nsys.argv[0:3] = [sys.argv[2]]\nrunpy.run_path({str(path)!r}, run_name='__main__')\n"
    return [sys.executable, "-I", "-S", "-c", BARE_ROOMS + run, ROOT, str(path), *arguments]
