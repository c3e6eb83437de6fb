"""The errors of serried that carry more than a text. Rooms above raise and catch them.

    Exception
      SerriedError                     rank, step: where it was raised, None when there is no such thing
        TransportError                 ranks could not exchange
          TagMismatch                  a rank is at another place of the program: culprit, expected, found
          PeerFailed                   a rank raised, ended or hangs: culprit, cause
          ExchangeMismatch             ranks agree on the place but not on the data: culprit, cause
        CheckpointError                weights on disk are not what the model needs: tensor, file, expected, found
        RequestError (also ValueError) a user's request is refused: field, value, rule

A wrong configuration of the engine is a plain ValueError, a mistake of our own an assert.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .transport import Tag


class SerriedError(Exception):
    """Base of all. `rank` is the rank that raises (not the one to blame), `step` the step it was in."""

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __str__(self) -> str:
        known = {"rank": self.rank, "step": self.step}
        where = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        message = super().__str__()
        return f"{where}: {message}" if where else message


class TransportError(SerriedError):
    """Ranks could not exchange data; the group is of no further use."""


class TagMismatch(TransportError):
    """Rank `culprit` came to an exchange with the tag `found`, the others with `expected`."""

    def __init__(
        self, culprit: int, expected: Tag, found: Tag, *, rank: int | None = None, step: int | None = None
    ) -> None:
        super().__init__(f"rank {culprit} is out of step: expected {expected}, found {found}", rank=rank, step=step)
        self.culprit = culprit
        self.expected = expected
        self.found = found


class PeerFailed(TransportError):
    """Rank `culprit` raised, ended or hangs, so nobody can go on; `cause` says which, in words."""

    def __init__(self, culprit: int, cause: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(f"rank {culprit} {cause}", rank=rank, step=step)
        self.culprit = culprit
        self.cause = cause


class ExchangeMismatch(TransportError):
    """Rank `culprit` disagrees with the others about the data of one exchange: operation, dtype, shape or splits."""

    def __init__(self, culprit: int, cause: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(f"rank {culprit} disagrees about an exchange: {cause}", rank=rank, step=step)
        self.culprit = culprit
        self.cause = cause


class CheckpointError(SerriedError):
    """`tensor` in `file` is missing, unexpected, misshaped or cut off. A whole file can be at fault: tensor is None."""

    def __init__(
        self,
        tensor: str | None,
        file: str | Path | None,
        expected: object,
        found: object,
        *,
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        place = " in ".join(str(part) for part in (tensor, file) if part is not None) or "checkpoint"
        super().__init__(f"{place}: expected {expected}, found {found}", rank=rank, step=step)
        self.tensor = tensor
        self.file = file
        self.expected = expected
        self.found = found


class RequestError(SerriedError, ValueError):
    """A user's request is refused because `field` holds `value`; `rule` says what would be legal."""

    def __init__(
        self, field: str, value: object, rule: str, *, rank: int | None = None, step: int | None = None
    ) -> None:
        super().__init__(f"{field} = {value!r}: {rule}", rank=rank, step=step)
        self.field = field
        self.value = value
        self.rule = rule
