"""What was compiled is found again by the next start, but not by that of other sources."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numba import types

from ep.cpu import disk
from ep.cpu.calls import Kernel

ROOT = Path(__file__).resolve().parents[3]
CALL = types.void(types.CPointer(types.int64))
C_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def nothing(args):
    return


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    disk._folder.cache_clear()
    yield tmp_path / "home"
    disk._folder.cache_clear()


def test_what_is_compiled_is_kept_under_the_sources_it_came_from(home: Path):
    Kernel(disk.kept(CALL, C_CALL, nothing))(0)
    (folder,) = (home / ".cache" / "serried" / "kernels").iterdir()
    [file] = [file for file in folder.iterdir() if file.name != "lock"]
    before = file.stat()
    Kernel(disk.kept(CALL, C_CALL, nothing))(0)
    assert file.stat() == before
    name, machine_code = file.read_bytes().split(b"\n", 1)
    assert b"nothing" in name
    assert machine_code.startswith(b"\x7fELF")
    changed = home / "changed.py"
    changed.write_text("another source")
    assert disk._folder(changed) not in (None, str(folder))


PROGRAM = """
import ctypes
import time
from numba import types
from ep.cpu import disk

compile_now = disk.numba.cfunc

def slow(*args, **options):
    print("compiled")
    time.sleep(0.3)
    return compile_now(*args, **options)

def nothing(args):
    return

disk.numba.cfunc = slow
disk.kept(types.void(types.CPointer(types.int64)), ctypes.CFUNCTYPE(None, ctypes.c_void_p), nothing)
"""


@pytest.mark.timeout(90)
def test_of_processes_that_start_together_one_compiles(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    given: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, program], **given) for _ in range(3)]
    compiled = [each.communicate(timeout=80)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0, 0]
    assert sorted(compiled) == ["", "", "compiled\n"]


def test_where_nobody_may_write_kernels_are_compiled_at_every_start(home: Path):
    home.write_text("a file, and no folder")
    Kernel(disk.kept(CALL, C_CALL, nothing))(0)
    assert disk._folder(Path(__file__)) is None


def test_a_start_that_compiled_for_long_says_so(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "_SPENT_S", [0.2, 0.3])
    assert disk.note() is None
    disk._SPENT_S.append(8.4)
    assert disk.note() == "kernels were compiled for this processor in 9 s, and are kept for the next start"
    home.rename(home.with_name("gone"))
    home.write_text("a file, and no folder")
    disk._folder.cache_clear()
    assert disk.note() == "kernels were compiled for this processor in 9 s, for no folder for them can be written"
