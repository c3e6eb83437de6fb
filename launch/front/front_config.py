"""How much a front door lets in, and how much it keeps for who reads slowly. Frozen; names, defaults and ranges."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.requests.admission import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """The front door's limits."""

    max_queued_tokens: int = 262144
    """Prompt tokens of requests that wait for their first token, over all ranks; what would be more is refused."""

    max_cache_demand: float = 4.0
    """Pages that all requests may grow to, as a multiple of all ranks' pages; what would be more is refused."""

    max_open_requests: int = 8192
    """Requests that are in the house at a time, each answer of n counted; what would be more is refused."""

    stream_interval: int = 1
    """Tokens that are handed to a stream at a time, at least (the first and the last excepted): more cost less."""

    outbox_tokens: int = 8192
    """Tokens that wait for a slow reader of a stream, before it is dropped and its request aborted."""

    def __post_init__(self) -> None:
        for name in ("max_queued_tokens", "max_open_requests", "stream_interval", "outbox_tokens"):
            at_least(name, getattr(self, name), 1, neighbour=1024)
        if not 0.0 < self.max_cache_demand < float("inf"):
            raise ValueError(f"max_cache_demand is {self.max_cache_demand}; it must be a number above 0, e.g. 4.0")
