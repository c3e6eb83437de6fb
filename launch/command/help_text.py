"""The parser's help, drawn in boxes, as plain text: a flag, then what it does, wrapped once.

The parser keeps the line breaks of the source inside a flag's help and wraps again, so that lines end anywhere; and it
says of a flag that may be unset that it takes `{None}|INT`. Knows how its boxes look; text without boxes stays.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

INDENT = 26
"""Columns before what a flag does."""
_TOP = re.compile(r"╭─ (?P<title>.*?) ─*╮$")
_BOTTOM = re.compile(r"╰─+╯$")
_RULE = re.compile(r"─+$")


def plain_help(text: str, *, width: int) -> str:
    """`text` (usage, description, boxes) with its boxes as paragraphs of at most `width` columns."""
    out: list[str] = []
    box: list[str] | None = None
    for line in text.splitlines():
        if top := _TOP.match(line):
            out += [*([""] if out[-1:] != [""] else []), f"{top['title']}:"]
            box = []
        elif box is None:
            out.append(without_none(line.rstrip()))
        elif _BOTTOM.match(line):
            out += _paragraphs(box, width)
            box = None
        else:
            box.append(re.sub(r"^│ | *│$", "", line))
    return "\n".join([*out, *(box or [])]) + "\n"


def without_none(text: str) -> str:
    """What a flag takes, without the word that says that it may be unset: that is its default already."""
    return text.replace("{None}|", "")


def _paragraphs(box: list[str], width: int) -> Iterator[str]:
    about = next((place for place, line in enumerate(box) if _RULE.match(line)), 0)
    if about:
        yield from textwrap.wrap(" ".join(box[:about]), width, initial_indent="  ", subsequent_indent="  ")
    for head, said in _entries(box[about + 1 if about else 0 :]):
        yield from _entry(head, said, width)


def _entries(rows: list[str]) -> Iterator[tuple[str, str]]:
    """Each flag and its help; lines that begin further right belong to the one above."""
    found: list[list[str]] = []
    for row in rows:
        if row[:1] not in ("", " "):
            found.append(re.split(r"  +", row, maxsplit=1))
        elif row.strip() and found:
            found[-1].append(row.strip())
    for head, *said in found:
        words = re.sub(r"\s+", " ", " ".join(said)).strip()
        if "unset: " in words:  # what that means is said, so there is no need for the word that stands for it
            words = words.removesuffix(" (default: None)")
        yield without_none(head.strip()), words


def _entry(head: str, said: str, width: int) -> Iterator[str]:
    space = " " * INDENT
    lines = textwrap.wrap(said, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
    if lines and len(head) + 4 <= INDENT:
        lines[0] = f"  {head}".ljust(INDENT) + lines[0][INDENT:]
        yield from lines
        return
    yield f"  {head}"
    yield from lines
