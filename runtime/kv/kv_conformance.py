"""What any connector must do, whatever is behind it: a giver's pages come to a taker as they are, or not at all.

AssertionError says what differs. Giver and taker may be the same connector over the same cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import torch

from ..requests.kv_params import KvParams
from ..requests.prefix import chained_digest, token_digest
from .connector import Connector, Kept, KvLoadError, Landed, Lent, Load, Want
from .kv_pages import PageBytes

WAIT_S = 20.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who has pages and who is to get them, each with its cache; caches have at least 8 pages, alike in kind."""

    giver: Connector
    given: PageBytes
    taker: Connector
    taken: PageBytes


def check_connector(ends: Ends) -> None:
    """Put both ends through their paces; they are closed afterwards."""
    _Check(ends).run()


class _Check:
    """Prompts of three pages, the last of which is not full; pages 0 .. 2 at the giver, 4 .. 6 at the taker."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.size = ends.given.page_size
        self.num_tokens = 3 * self.size - (self.size > 1)
        self.made = 0

    def run(self) -> None:
        assert self.ends.taker.find(self._want(None)) is None, "found what nobody gave"
        self._check_brings(skip=0)
        self._check_brings(skip=1)
        self._check_cancel(begun=False)
        self._check_cancel(begun=True)
        self._check_stranger()
        for end in (self.ends.giver, self.ends.taker):
            end.close()
            end.close()

    def _give(self) -> tuple[Want, Lent | None]:
        """A new prompt at the giver, and what a taker knows of it."""
        self.made += 1
        want = self._want(None)
        ends, pages = self.ends, (0, 1, 2)
        for page in pages:
            layer_bytes = (1, ends.given.num_layers, ends.given.layer_bytes)
            seeded = torch.Generator().manual_seed(100 * self.made + page)
            ends.given.put([page], torch.randint(0, 60, layer_bytes, generator=seeded, dtype=torch.uint8))
        for digest, page in zip(want.digests, pages, strict=False):
            ends.giver.save(digest, page)
        sums = tuple(ends.given.sums(pages, self.num_tokens).tolist())
        lent = ends.giver.lend(
            Kept(
                request_id=want.request_id,
                num_tokens=self.num_tokens,
                pages=pages,
                sums=sums,
                identity=want.identity,
            )
        )
        return replace(want, params=lent.params if lent is not None else None), lent

    def _want(self, params: KvParams | None) -> Want:
        tokens = [self.made, *range(1, self.num_tokens)]
        digests, parent = [], b""
        for start in range(0, self.num_tokens - self.size + 1, self.size):
            parent = chained_digest(parent, tokens[start : start + self.size])
            digests.append(parent)
        return Want(
            request_id=f"prompt-{self.made}",
            num_tokens=self.num_tokens,
            digests=digests,
            identity=token_digest(tokens),
            params=params,
        )

    def _find(self, want: Want) -> Load:
        """What was given is found, at once or a moment later."""
        load = _until(lambda: self._whole(want))
        assert load is not None, f"{want.request_id} was given, and is not found"
        return load

    def _whole(self, want: Want) -> Load | None:
        load = self.ends.taker.find(want)
        least = self.num_tokens if want.params is not None else self.num_tokens // self.size * self.size
        if load is not None and load.num_tokens < least:
            load.cancel()
            return None
        return load

    def _check_brings(self, *, skip: int) -> None:
        want, lent = self._give()
        load = self._find(want)
        assert load.poll() is None, "it landed before it had pages"
        num_pages = -(-load.num_tokens // self.size)
        pages = [4, 5, 6][skip:num_pages]
        load.begin(skip=skip, pages=pages)
        landed = _until(load.poll)
        assert isinstance(landed, Landed), "it never landed"
        if landed.bytes_NLY is not None:
            self.ends.taken.put(pages, landed.bytes_NLY)
        left = load.num_tokens - skip * self.size
        found = self.ends.taken.sums(pages, left).tolist()
        given = self.ends.given.sums(range(skip, num_pages), left).tolist()
        assert found == given, f"pages {pages} hold other bytes than what was given"
        assert list(landed.sums) == given, "the sums that came are not those of what was given"
        if lent is not None:
            assert _until(lent.is_over), "it was fetched, and its lease goes on"

    def _check_cancel(self, *, begun: bool) -> None:
        want, lent = self._give()
        load = self._find(want)
        if begun:
            load.begin(skip=0, pages=[4, 5, 6][: -(-load.num_tokens // self.size)])
        load.cancel()
        assert _until(lambda: _is_over(load)), "it was cancelled, and never ends"
        if lent is not None:
            assert _until(lent.is_over), "nobody wants it, and its lease goes on"

    def _check_stranger(self) -> None:
        """A name that nobody has: nothing, or a load that fails in words."""
        want, lent = self._give()
        if lent is None or want.params is None:
            return
        for change in ({"remote_request_id": "nobody"}, {"remote_engine_id": "another"}, {"remote_port": 1}):
            load = self.ends.taker.find(replace(want, params=msgspec.structs.replace(want.params, **change)))
            assert load is None or _until(lambda load=load: _is_over(load)), f"a load with {change} never ends"
        load = self.ends.taker.find(replace(want, identity=token_digest([0])))
        assert load is None or _until(lambda: _is_over(load)), "another prompt's latents were handed out"


def _is_over(load: Load) -> bool:
    """Failed, or landed all the same."""
    try:
        return load.poll() is not None
    except KvLoadError:
        return True


def _until(ask: Callable[[], T]) -> T:
    end = time.monotonic() + WAIT_S
    while not (found := ask()) and time.monotonic() < end:
        time.sleep(0.002)
    return found
