"""Where ranks show themselves: this user's own folder, cleared of groups that are gone, and never anybody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.groups.display import Display
from launch.groups.run_folder import RunFolder, base_folder, clear_dead, read_runs
from runtime.failure.verdict import Reason, Verdict
from runtime.loop.show_page import PageState
from runtime.loop.showing import NOT_SHOWN


def dead(base: Path, run: str, *, rank: int = 0) -> None:
    """A group whose process is gone: no process began at tick 1 with this number."""
    RunFolder.open(base, run).page(rank=rank, size=2).write({"started": 1})


def test_the_usual_folder_is_the_sessions_own_or_in_memory(tmp_path: Path):
    assert base_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "serried"
    assert base_folder({"XDG_RUNTIME_DIR": str(tmp_path / "none")}).name.startswith("serried-")
    assert base_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path / "mine") == tmp_path / "mine"


def test_a_group_is_seen_while_it_runs_and_leaves_nothing(tmp_path: Path):
    base = tmp_path / "base"
    first, second = (Display("run", chosen=base) for _ in range(2))
    shows = [first.show(0, 2), second.show(1, 2)]
    assert NOT_SHOWN not in shows
    assert base.stat().st_mode & 0o777 == 0o700
    [pages] = read_runs(base).values()
    assert [(page.words["rank"], page.state) for page in pages] == [(0, PageState.STARTING), (1, PageState.STARTING)]
    first.close()
    assert len(read_runs(base)["run"]) == 1
    second.close()
    second.close()
    assert list(base.iterdir()) == []


def test_what_a_killed_group_left_is_not_shown_and_cleared_by_the_next(tmp_path: Path):
    dead(tmp_path, "old")
    assert read_runs(tmp_path) == {}
    (tmp_path / "being-made").mkdir()
    clear_dead(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["being-made"]


def test_a_group_that_failed_is_shown_until_the_next_one_starts(tmp_path: Path):
    base = tmp_path / "base"
    display = Display("failed", chosen=base)
    display.show(0, 2)
    display.fail(Verdict(culprit=1, reason=Reason.GONE, cause="its process has ended"))
    [page] = read_runs(base)["failed"]
    assert (page.culprit, page.reason) == (1, "gone")
    dead(tmp_path, "unrelated")
    display._pages[0].write({"started": 1})
    assert list(read_runs(base)) == ["failed"], "its processes are gone, and it is still said"
    Display("next", chosen=base).show(0, 1)
    assert list(read_runs(base)) == ["next"]


@pytest.mark.parametrize("kind", ["open to all", "a file", "a link"])
def test_a_folder_that_is_not_ones_own_is_not_used_and_the_group_runs_all_the_same(tmp_path: Path, kind: str):
    base = tmp_path / "base"
    if kind == "open to all":
        base.mkdir()
        base.chmod(0o777)
    elif kind == "a file":
        base.write_text("")
    else:
        (tmp_path / "real").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "real")
    display = Display("run", chosen=base)
    assert display.show(0, 1) is NOT_SHOWN
    assert "serried top will not see these ranks" in display.warnings[0]
    display.close()
