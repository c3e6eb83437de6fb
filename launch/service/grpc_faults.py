"""Why a call is not answered, as gRPC says it: a status, words, and for programs a reason and a hint when to retry.

    INVALID_ARGUMENT      the request can never be answered: field, value, rule
    UNIMPLEMENTED         the method is there and nothing behind it
    RESOURCE_EXHAUSTED    full now, retry later: trailing metadata says why and when
    UNAVAILABLE           not ready, draining, or the group has failed
    NOT_FOUND             there is no such request any more
    ALREADY_EXISTS        a request of this id runs

Knows the errors of the group; does not know messages or methods.
"""

from __future__ import annotations

import grpc

from ep.errors import RequestError

from ..front.front_client import Refused

REASON_KEY = "serried-reason"
RETRY_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata; gRPC's own clients wait so long before they retry (gRPC proposal A6, client retries)."""

MAX_DETAIL = 1000

STATUS_BY_REASON = {
    "draining": grpc.StatusCode.UNAVAILABLE,
    "not_ready": grpc.StatusCode.UNAVAILABLE,
    "group_failed": grpc.StatusCode.UNAVAILABLE,
    "too_long": grpc.StatusCode.INVALID_ARGUMENT,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Whatever else the group refuses for is a lack of room."""


class Fault(Exception):
    """A call ends with `status` and `detail`; `reason` is one word for programs and for the metrics."""

    def __init__(
        self, status: grpc.StatusCode, detail: str, *, reason: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = one_line(detail)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Metadata that goes with the status."""
        entries = [(REASON_KEY, self.reason)]
        if self.retry_after_s is not None:
            entries.append((RETRY_KEY, str(max(1, round(1000 * self.retry_after_s)))))
        return tuple(entries)


def invalid(field: str, value: object, rule: str) -> Fault:
    """A field of a request that can never do."""
    return Fault(grpc.StatusCode.INVALID_ARGUMENT, f"{field} = {value!r}: {rule}", reason="invalid")


def not_served(field: str, what: str) -> Fault:
    """A field that asks for something which this engine has not."""
    return Fault(
        grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {what} is not served; leave the field out", reason="not_served"
    )


def unimplemented(what: str) -> Fault:
    """A method with nothing behind it."""
    return Fault(grpc.StatusCode.UNIMPLEMENTED, f"{what} is not served by this engine", reason="not_served")


def fault_of(error: Refused | RequestError) -> Fault:
    """The fault that says what the group said."""
    if isinstance(error, RequestError):
        return Fault(grpc.StatusCode.INVALID_ARGUMENT, str(error), reason="invalid")
    status = STATUS_BY_REASON.get(error.reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return Fault(status, str(error), reason=error.reason, retry_after_s=error.retry_after_s)


def one_line(text: str) -> str:
    """As a status may carry it: one line, printable, and short whatever a client sent."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:MAX_DETAIL])
    return shown if len(text) <= MAX_DETAIL else f"{shown}..."
