"""What brings latents into the cache instead of computing them, and keeps them for later: the seam to other places.

    find     what could be loaded beyond what the cache has: a Load, which waits until it is given pages
    begin    pages are given; poll until it has landed, or failed
    save     a full page is final: a store may copy it
    lend     a prompt is computed, and another engine is to fetch it: a Lent, whose pages stay until it is over

Two kinds of connector answer: stores, which keep pages by what they hold, and peers, which fetch the pages of one
request from the engine that computed them. A connector moves bytes; whether they are the right ones is found here, once
for all of them: every load says the sums that its pages must have, and they are computed over what is in the cache
(`hand_over`). So nothing need be waited for layer by layer: before all of it is verified nobody reads any of it.

Values only; nothing here knows where pages go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ep.errors import SerriedError

from ..requests.kv_params import KvParams

if TYPE_CHECKING:  # requests are scheduled without it
    from torch import Tensor


class KvLoadError(SerriedError):
    """Latents could not be fetched, or are not the right ones. No connector writes to the load's pages any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A request that could do with less to compute.

    num_tokens   those that may be loaded, at most: its last one has to be computed to sample what follows
    digests      of its full pages within those (see `prefix`); empty where prefixes are not cached
    identity     stands for the first `num_tokens` tokens (see `prefix.token_digest`)
    params       who has them, where the request says so
    """

    request_id: str
    num_tokens: int
    digests: Sequence[bytes]
    identity: bytes
    params: KvParams | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What a load brought.

    sums        what each of its pages must sum up to
    bytes_NLY   the pages (see `kv_pages`), to be put into the cache; None: they are there already
    """

    sums: Sequence[int]
    bytes_NLY: Tensor | None


class Load(Protocol):
    """Latents on their way, for the first `num_tokens` tokens of a request."""

    @property
    def num_tokens(self) -> int: ...

    def begin(self, *, skip: int, pages: Sequence[int]) -> None:
        """Fetch the pages from number `skip` on into these of the cache, which are this load's until it is over."""
        ...

    def poll(self) -> Landed | None:
        """None while it is on its way; never waits. Raises KvLoadError, also once a cancelled one is over."""
        ...

    def cancel(self) -> None:
        """Nobody wants it any more. It may still write until `poll` says that it is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A computed prompt: these pages hold its first `num_tokens` tokens and do not change."""

    request_id: str
    num_tokens: int
    pages: tuple[int, ...]
    sums: tuple[int, ...]
    identity: bytes


class Lent(Protocol):
    """A prompt that another engine is to fetch; `params` is what it needs to find it."""

    @property
    def params(self) -> KvParams: ...

    def is_over(self) -> bool:
        """Whether it was fetched, given up or kept for long enough: nobody reads its pages any more."""
        ...


class Connector(Protocol):
    """One rank's. Called in the rank's thread; never waits."""

    def find(self, want: Want) -> Load | None:
        """What this connector could bring of a request; None: nothing."""
        ...

    def save(self, digest: bytes, page: int) -> None:
        """This full page of the cache is final; it must be copied before the call returns, or not at all."""
        ...

    def lend(self, kept: Kept) -> Lent | None:
        """Let others fetch a prompt; None where this is not for this connector."""
        ...

    def close(self) -> None:
        """Let go of everything; twice is the same as once."""
        ...
