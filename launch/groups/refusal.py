"""What the user asked for cannot be done: one line on standard error and exit code 2, never a traceback.

Only preparing is wrapped (reading flags, files and weights, admitting requests). An error of the same type in the
middle of a decode is the program's own fault and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ep import SerriedError


class Refusal(Exception):
    """str() is the line to print, without the program's name."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what bad input raises inside (ValueError, OSError, SerriedError) into a Refusal with the same words."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Refusal(f"{where}{error.strerror or error}") from error
    except (ValueError, SerriedError) as error:
        raise Refusal("; ".join(str(error).splitlines())) from error
