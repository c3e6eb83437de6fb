"""ep: how ranks exchange rows. Transports, the exchange of tokens with expert slots, and the errors of the engine."""

from .capacity import CapacityPlan
from .config import ExchangeConfig, choose
from .errors import (
    CheckpointError,
    ExchangeMismatch,
    PeerFailed,
    RequestError,
    SerriedError,
    TagMismatch,
    TransportError,
)
from .exchange import Arrivals, Exchange
from .hops import PairRows
from .ops import ExchangeOps, exchange_ops
from .rows import wide
from .subgroup import ExchangeBytes
from .terms import Terms
from .threads import ThreadGroup, ThreadTransport, run_ranks
from .topology import Topology
from .transport import Kind, Pending, Tag, Transport

__all__ = [
    "Arrivals",
    "CapacityPlan",
    "CheckpointError",
    "Exchange",
    "ExchangeBytes",
    "ExchangeConfig",
    "ExchangeMismatch",
    "ExchangeOps",
    "Kind",
    "PairRows",
    "PeerFailed",
    "Pending",
    "RequestError",
    "SerriedError",
    "Tag",
    "TagMismatch",
    "Terms",
    "ThreadGroup",
    "ThreadTransport",
    "Topology",
    "Transport",
    "TransportError",
    "choose",
    "exchange_ops",
    "run_ranks",
    "wide",
]
