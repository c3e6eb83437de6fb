"""Where the ranks of this machine show themselves: a folder of the user's own, one folder in it for each group.

    $XDG_RUNTIME_DIR/serried, or /dev/shm/serried-UID, or serried-UID in the folder for temporary files
        RUN/rank0  RUN/rank1 ...      pages, see `runtime.loop.show_page`

Only this user may enter it. A group takes its folder away when it ends; what a failed one left is cleared by the next.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.loop.show_page import Shown, ShowPage, read_page


def base_folder(environ: Mapping[str, str], chosen: Path | None = None) -> Path:
    """The folder of this user's groups; `chosen` by a flag, or the usual one."""
    if chosen is not None:
        return chosen
    own = environ.get("XDG_RUNTIME_DIR")
    if own and Path(own).is_dir():
        return Path(own) / "serried"
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"serried-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One group's folder."""

    path: Path

    @classmethod
    def open(cls, base: Path, run: str) -> RunFolder:
        """Make it, or enter the one that another rank of the group has made. OSError or ValueError where that cannot
        be, or is not safe."""
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(base)
        clear_dead(base)
        path = base / run
        path.mkdir(mode=0o700, exist_ok=True)
        check_own(path)
        return cls(path)

    def page(self, *, rank: int, size: int) -> ShowPage:
        """A rank's page. OSError where it cannot be made."""
        return ShowPage(self.path / f"rank{rank}", rank=rank, size=size)

    def remove(self) -> None:
        """The group has ended. Twice is once; ranks of one machine may do it together."""
        shutil.rmtree(self.path, ignore_errors=True)


def check_own(folder: Path) -> None:
    """ValueError unless the folder is this user's and nobody else may write there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"{folder} is not a folder of this user's own; take it away, or give another with --run-dir")


def read_runs(base: Path) -> dict[str, list[Shown]]:
    """The groups that have a living rank here or have failed, by name: their pages in rank order."""
    found = {}
    for folder in sorted(base.iterdir()) if base.is_dir() else ():
        pages = pages_of(folder)
        if any(page.process != "gone" or page.culprit is not None for page in pages):
            found[folder.name] = pages
    return found


def pages_of(folder: Path) -> list[Shown]:
    """Of one group, in rank order."""
    try:
        paths = list(folder.glob("rank*"))
    except OSError:
        return []
    pages = [page for path in paths if (page := read_page(path)) is not None]
    return sorted(pages, key=lambda page: page.words["rank"])


def clear_dead(base: Path) -> None:
    """Take away the folders of groups whose ranks are all gone; one without pages is just being made."""
    for folder in base.iterdir():
        pages = pages_of(folder)
        if pages and all(page.process == "gone" for page in pages):
            RunFolder(folder).remove()
