"""A table at its own width, also where the output is narrower or is a file: cut words and numbers say nothing."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDEST = 140
"""Columns a table may take."""


def print_table(out: Console, table: Table) -> None:
    """Print `table` to `out`, at most WIDEST columns wide, or as wide as `out` is."""
    wide = Console(file=out.file, width=max(out.width, WIDEST), force_terminal=out.is_terminal, highlight=False)
    wide.print(table)
