"""From a command's words to its flags, or to one line that says what is wrong with them.

Flags are the fields of dataclasses; the docstrings under the fields are their help. There is no second list.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from ..groups.refusal import Refusal
from .help_text import plain_help, without_none
from .vllm_flags import of_vllm

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RULE = re.compile(r"[╭╮╰╯│─\- ]*")
"""A line that only draws: the parser's boxes, or its rules of hyphens where the output is not UTF-8."""
WIDEST = 120
"""Columns of help, at most."""
DRAWN = 100
"""Columns that the parser draws its boxes in; what is in them is wrapped anew."""
UNKNOWN = re.compile(r"unrecognized options: (-\S+?)(?:[,=]| |$)")


class BoxedText(io.StringIO):
    """A file for the parser's help, which is to draw boxes whatever the real output can spell."""

    encoding = "utf-8"


def parse_flags(flags: type[Any], words: Sequence[str], *, name: str, about: str) -> Any:
    """`words` as an instance of `flags`; `--help` prints and exits with 0. Raises Refusal with what is wrong."""
    said, shown = io.StringIO(), BoxedText()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown), _one_column():
            return tyro.cli(
                flags,
                prog=f"serried {name}",
                description=about,
                args=list(words),
                config=(tyro.conf.PositionalRequiredArgs, tyro.conf.PositionalMetavarFromFieldName),
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            width = min(shutil.get_terminal_size().columns, WIDEST)
            print(plain_help(COLOUR.sub("", shown.getvalue()), width=width), end="")
            raise
        text = COLOUR.sub("", said.getvalue())  # the parser colours what it says where standard error is a terminal
        line = without_none(_one_line(text, exit_)).replace(" (required)", "")
        raise Refusal(f"{_vllm_line(line) or line} (serried {name} --help)") from exit_


@contextlib.contextmanager
def _one_column() -> Iterator[None]:
    """The parser asks how wide the terminal is, and sets boxes side by side in a wide one; it is told one width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(DRAWN)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _one_line(box: str, exit_: SystemExit) -> str:
    """What the parser says in a box of lines, as one line; a config's own words come unwrapped from its error."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:] if not RULE.fullmatch(line)]
    text = re.sub(r"\s+", " ", " ".join(lines)).strip()
    text = re.split(r" ?(?:For full helptext|Argument helptext)", text)[0]
    cause = exit_.__context__ and exit_.__context__.__context__
    place = re.match(r"Error parsing (\S+): ", text)
    if place is None:
        return text[:1].lower() + text[1:]
    words = str(cause) if isinstance(cause, ValueError) else text[place.end() :]
    return f"{place[1]}: {words}" if place[1].startswith("-") else words


def _vllm_line(line: str) -> str | None:
    """What to say instead, where the flag that is unknown here is one of `vllm serve`."""
    unknown = UNKNOWN.match(line)
    return of_vllm(unknown[1]) if unknown else None
