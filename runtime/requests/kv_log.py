"""What changed in a rank's prefix cache since somebody asked: pages that can be found, and those that no longer can.

Between two questions only what is left of the changes counts: a page that came and went is not mentioned. Knows digests
and tokens; does not know pages, nor who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class KvStored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A page that can be found from now on: its hash, that of the page before it (None for the first), its tokens."""

    block_hash: int
    parent_hash: int | None
    token_ids: tuple[int, ...]


class KvLetter(msgspec.Struct, tag="kv", frozen=True):
    """What changed in a rank's prefix cache since its last one: cleared, then removed, then stored.

    sequence counts a rank's letters from 1; a gap means that one was lost.
    """

    sequence: int
    cleared: bool
    removed: tuple[int, ...]
    stored: tuple[KvStored, ...]


def block_hash(digest: bytes) -> int:
    """A page's digest as a signed number of 64 bits, as gateways keep it."""
    return int.from_bytes(digest[:8], "little", signed=True)


class KvLog:
    """The changes of one rank."""

    def __init__(self) -> None:
        self._cleared = False
        self._removed: dict[int, None] = {}
        self._stored: dict[int, KvStored] = {}
        self._sequence = 0

    def stored(self, digest: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """The page of this digest can be found; `parent` is the digest of the page before it."""
        name = block_hash(digest)
        parent_name = None if parent is None else block_hash(parent)
        self._stored[name] = KvStored(name, parent_name, tuple(token_ids))

    def removed(self, digest: bytes) -> None:
        """It no longer can: something else is in its page."""
        name = block_hash(digest)
        if self._stored.pop(name, None) is None:
            self._removed[name] = None

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self._cleared = True
        self._removed.clear()
        self._stored.clear()

    def take(self) -> KvLetter | None:
        """All that changed since the last call; None if nothing did."""
        if not (self._cleared or self._removed or self._stored):
            return None
        self._sequence += 1
        letter = KvLetter(self._sequence, self._cleared, tuple(self._removed), tuple(self._stored.values()))
        self._cleared, self._removed, self._stored = False, {}, {}
        return letter
