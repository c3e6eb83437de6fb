"""How those who move many bytes tell how far they are: what they say, and what a bar wants to hear."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]
"""Called with the bytes moved since the last call."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes moved so far, and in all."""


def counted(report: OnProgress | None, *, total: int) -> Progress:
    """A Progress that adds up and passes on, where anybody wants to hear."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if report is not None:
            report(done, total)

    return add
