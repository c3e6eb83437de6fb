"""A rank's page: what is written is what is read, also amid a write, and whatever became of the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.failure.verdict import Reason, Verdict
from runtime.loop.show_page import HEAT_CELLS, PAGE_BYTES, PageState, ShowPage, folded, process_state, read_page


@pytest.fixture
def page(tmp_path: Path) -> ShowPage:
    return ShowPage(tmp_path / "rank3", rank=3, size=8)


def shown(page: ShowPage):
    found = read_page(page.path)
    assert found is not None
    return found


def test_what_is_written_is_read(page: ShowPage):
    page.write({"state": PageState.STEPS, "step": 7, "running": 5})
    page.write_heat([1, 3, 0, 2])
    page.write_note("rank 2 is slow \u00e9")
    found = shown(page)
    assert (found.words["rank"], found.words["size"], found.words["step"], found.words["running"]) == (3, 8, 7, 5)
    assert found.state is PageState.STEPS
    assert found.heat == (0x5555, 0xFFFF, 0, 0xAAAA)
    assert found.note == "rank 2 is slow \u00e9"
    assert (found.process, found.culprit) == ("running", None)


def test_many_experts_share_cells_and_no_load_is_no_error(page: ShowPage):
    assert folded([1, 2, 3, 4, 5], 3) == [3, 7, 5]
    assert folded([], 3) == []
    page.write_heat([1] * 300)
    assert len(shown(page).heat) <= HEAT_CELLS
    page.write_heat([0, 0])
    assert shown(page).heat == (0, 0)


def test_a_long_note_is_cut(page: ShowPage):
    page.write_note("x" * 5000)
    assert set(shown(page).note) == {"x"}
    page.write_note("y")
    assert shown(page).note == "y"


def test_a_verdict_says_who_failed_and_stays(page: ShowPage):
    page.write_verdict(Verdict(culprit=2, reason=Reason.STOPPED, cause="its process is stopped"))
    found = shown(page)
    assert (found.culprit, found.reason) == (2, "stopped")
    assert "rank 2 failed" in found.note


@pytest.mark.parametrize("data", [b"", b"\0" * PAGE_BYTES, b"\xff" * PAGE_BYTES, b"\0" * (PAGE_BYTES + 1)])
def test_what_is_no_page_is_none(tmp_path: Path, data: bytes):
    path = tmp_path / "rank0"
    path.write_bytes(data)
    assert read_page(path) is None
    assert read_page(tmp_path / "none") is None


def test_a_page_is_never_made_over_a_file_that_is_there(page: ShowPage):
    with pytest.raises(FileExistsError):
        ShowPage(page.path, rank=3, size=8)
    page.close()
    assert not page.path.exists()
    page.close()


@pytest.mark.timeout(120)
def test_a_reader_never_sees_half_a_write(page: ShowPage):
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            page.write({"step": number, "running": number, "waiting": number, "free_pages": number})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            words = shown(page).words
            assert len({words[name] for name in ("step", "running", "waiting", "free_pages")}) == 1
    finally:
        over.set()
        writer.join()


@pytest.mark.timeout(120)
def test_the_system_says_whether_a_process_runs_is_stopped_or_is_gone():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        started = int(Path(f"/proc/{child.pid}/stat").read_text("ascii").rpartition(")")[2].split()[19])
        assert process_state(child.pid, started) == "running"
        assert process_state(child.pid, started - 1) == "gone", "another process with that number"
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 10
        while process_state(child.pid, started) != "stopped":
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGCONT)
    finally:
        child.communicate()
    assert process_state(child.pid, started) == "gone"
