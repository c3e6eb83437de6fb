"""Tests that want the machine alone have it, and do not wait for ever."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.alone import floor

LIMIT_S = 20.0


def is_free(path: Path, how: int) -> bool:
    """Whether who opens it anew could lock it so at once."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "floor").touch()
    return tmp_path / "floor"


def test_many_share_the_floor_and_nobody_is_at_the_door(file: Path):
    with floor(file, fcntl.LOCK_SH), floor(file, fcntl.LOCK_SH):
        assert is_free(file.parent, fcntl.LOCK_EX)
        assert is_free(file, fcntl.LOCK_SH)
        assert not is_free(file, fcntl.LOCK_EX)
    assert is_free(file, fcntl.LOCK_EX)


def test_who_wants_it_alone_waits_for_those_inside_and_keeps_later_ones_out(file: Path):
    inside, leave = Event(), Event()

    def be_alone() -> None:
        with floor(file, fcntl.LOCK_EX):
            inside.set()
            leave.wait(LIMIT_S)

    other = Thread(target=be_alone)
    with floor(file, fcntl.LOCK_SH):
        other.start()
        while is_free(file.parent, fcntl.LOCK_EX):  # until it is at the door, which it keeps shut
            assert other.is_alive()
        assert not inside.is_set()
    assert inside.wait(LIMIT_S)
    assert not is_free(file, fcntl.LOCK_SH)
    assert is_free(file.parent, fcntl.LOCK_EX)
    leave.set()
    other.join(LIMIT_S)
    assert is_free(file, fcntl.LOCK_EX)


def test_a_failing_test_leaves_the_floor(file: Path):
    with pytest.raises(KeyboardInterrupt), floor(file, fcntl.LOCK_EX):
        raise KeyboardInterrupt
    assert is_free(file, fcntl.LOCK_EX)
