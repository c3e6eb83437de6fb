"""ep: how ranks exchange rows. Transports, the exchange of tokens with expert slots, and the errors of the engine."""

from .combine import wide
from .errors import (
    CheckpointError,
    ExchangeMismatch,
    PeerFailed,
    RequestError,
    SerriedError,
    TagMismatch,
    TransportError,
)
from .exchange import Arrivals, Exchange, ExchangeConfig, buffer_bytes
from .terms import Terms
from .threads import ThreadGroup, ThreadTransport, run_ranks
from .transport import Kind, Pending, Tag, Transport

__all__ = [
    "Arrivals",
    "CheckpointError",
    "Exchange",
    "ExchangeConfig",
    "ExchangeMismatch",
    "Kind",
    "PeerFailed",
    "Pending",
    "RequestError",
    "SerriedError",
    "Tag",
    "TagMismatch",
    "Terms",
    "ThreadGroup",
    "ThreadTransport",
    "Transport",
    "TransportError",
    "buffer_bytes",
    "run_ranks",
    "wide",
]
