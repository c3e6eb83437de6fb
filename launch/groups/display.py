"""Puts the ranks of this process on show for `serried top`, and takes them off when they end.

A group runs without it as well as with it: where the folder cannot be used, that is said once, and nothing is shown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from runtime.failure.verdict import Verdict
from runtime.loop.show_page import PageState, ShowPage
from runtime.loop.showing import NOT_SHOWN, NotShown, Showing

from .run_folder import RunFolder, base_folder


class Display:
    """The ranks of this process in the folder of their group.

    run      the group's name, the same in all of its processes
    chosen   the user's own folder for all groups; None: the usual one
    """

    def __init__(self, run: str, *, chosen: Path | None, environ: Mapping[str, str] = os.environ) -> None:
        self.warnings: list[str] = []
        self._pages: list[ShowPage] = []
        self._folder: RunFolder | None = None
        try:
            self._folder = RunFolder.open(base_folder(environ, chosen), run)
        except (OSError, ValueError) as error:
            self.warnings.append(f"serried top will not see these ranks: {error}")

    def show(self, rank: int, size: int) -> NotShown:
        """Where that rank is to say how it is."""
        if self._folder is None:
            return NOT_SHOWN
        try:
            page = self._folder.page(rank=rank, size=size)
        except OSError as error:
            self.warnings.append(f"serried top will not see rank {rank}: {error}")
            return NOT_SHOWN
        self._pages.append(page)
        return Showing(page)

    def close(self) -> None:
        """These ranks end in order; whoever is the last of the group takes the folder away. Twice is once."""
        for page in self._pages:
            page.write({"state": PageState.ENDED})
            page.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # others are still in it
                self._folder.path.rmdir()

    def fail(self, verdict: Verdict) -> None:
        """The group has failed: the pages stay and say so, until another group starts."""
        for page in self._pages:
            page.write_verdict(verdict)
