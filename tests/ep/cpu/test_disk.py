"""What was compiled is found again by the next start, but not by that of other sources."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from numba import types

from ep.cpu import disk
from ep.cpu.calls import Kernel

CALL = types.void(types.CPointer(types.int64))


def nothing(args):
    return


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    disk._folder.cache_clear()
    yield tmp_path / "home"
    disk._folder.cache_clear()


def test_what_is_compiled_is_kept_under_the_sources_it_came_from(home: Path):
    Kernel(disk.kept(CALL, nothing))(0)
    (folder,) = (home / ".cache" / "serried" / "kernels").iterdir()
    assert list(folder.rglob("*.nbc"))
    changed = home / "changed.py"
    changed.write_text("another source")
    assert disk._folder(changed) not in (None, str(folder))


def test_where_nobody_may_write_kernels_are_compiled_at_every_start(home: Path):
    home.write_text("a file, and no folder")
    Kernel(disk.kept(CALL, nothing))(0)
    assert disk._folder(Path(__file__)) is None
