"""The service's log: lines for people, or one JSON object a line for machines, both on standard error.

A line says what happened, and where: rank, step and request, where there are such. Knows no handler of anybody else's;
text that a client sent is escaped, so that it cannot forge a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Literal, TextIO

from .serve_config import LogFormat

Level = Literal["info", "warning", "error"]


class Log:
    """Where the service says what it does."""

    def __init__(
        self, form: LogFormat, *, stream: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._write = _json_line if form == "json" else _text_line
        self._stream = stream
        self._clock = clock

    def say(
        self,
        text: str,
        *,
        level: Level = "info",
        rank: int | None = None,
        step: int | None = None,
        request: str | None = None,
        **more: object,
    ) -> None:
        """One line. `more` are further fields of the object; people see them as name=value."""
        where = {"rank": rank, "step": step, "request": request} | more
        fields = {name: value for name, value in where.items() if value is not None}
        stream = self._stream if self._stream is not None else sys.stderr  # tests put others in its place
        stream.write(self._write(self._clock(), level, text, fields) + "\n")
        stream.flush()


def _json_line(now: float, level: Level, text: str, fields: dict[str, object]) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    return json.dumps({"time": stamp, "level": level, "text": text} | fields, default=str)


def _text_line(now: float, level: Level, text: str, fields: dict[str, object]) -> str:
    stamp = time.strftime("%H:%M:%S", time.localtime(now))
    mark = "" if level == "info" else f"{level}: "
    shown = "".join(f" {name}={_printable(str(value))}" for name, value in fields.items())
    return f"{stamp} {mark}{_printable(text)}{shown}"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
