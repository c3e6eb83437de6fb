import subprocess
import sys
from pathlib import Path

import pytest

from launch.groups.house import ROOMS, home, house_fault, room_folders

ROOT = Path(__file__).resolve().parents[3]


def rooms_in(home_folder: Path) -> dict[str, Path | None]:
    return {room: home_folder / room for room in ROOMS}


def test_the_rooms_of_this_checkout_come_from_one_folder():
    assert home() == ROOT
    assert room_folders() == rooms_in(ROOT)
    assert house_fault(room_folders(), home=ROOT) is None


def test_a_room_from_elsewhere_is_named_with_its_folder():
    folders = rooms_in(Path("/here")) | {"moe": Path("/site/moe"), "dbo": Path("/site/dbo")}
    assert house_fault(folders, home=Path("/here")) == (
        "the seven rooms must come from one folder (/here), but Python would import moe from /site/moe and dbo from "
        "/site/dbo; another package carries the same name: uninstall it, or use a virtual environment of its own"
    )


def test_a_missing_room_is_named():
    folders = rooms_in(Path("/here")) | {"eplb": None}
    assert house_fault(folders, home=Path("/here")) == (
        "eplb cannot be imported, but belongs beside the other rooms in /here; install again with: pip install -e ."
    )


@pytest.fixture
def shadowed(tmp_path):
    """shadowed() -> a `serried plan` whose path has `tmp_path` before this checkout."""

    def run() -> "subprocess.CompletedProcess[str]":
        path = [str(tmp_path), str(ROOT)]
        start = (
            f"import sys; sys.path[:0] = {path}; from launch.cli import main; sys.exit(main(['plan', 'deepseek-v3']))"
        )
        return subprocess.run(
            [sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_the_command_refuses_in_one_line_when_a_room_is_shadowed(shadowed, tmp_path):
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("raise RuntimeError('the other runtime')\n")
    done = shadowed()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"serried: the seven rooms must come from one folder ({ROOT}), but Python would import runtime from "
        f"{tmp_path / 'runtime'}; another package carries the same name: uninstall it, or use a virtual environment of "
        "its own\n"
    )


def test_a_single_file_with_a_rooms_name_is_seen_too(shadowed, tmp_path):
    (tmp_path / "moe.py").write_text("")
    done = shadowed()
    assert (done.returncode, done.stdout) == (2, "")
    assert f"moe from {tmp_path / 'moe.py'};" in done.stderr
