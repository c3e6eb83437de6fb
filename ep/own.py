"""The hop of a rank that is a group of its own: rows are where they go, and what comes of them is where it came from.

Nothing is packed, counted or told, for there is nobody who could be elsewhere in the program. Sums stay lazy: what one
rank gives back is rounded once on the wire of a longer hop and once more at its source, to numbers no wider than the
wire's, which is the same as to round it once.
"""

from __future__ import annotations

from .hops import Landed, PairRows
from .rows import Rows
from .sums import Sums
from .terms import Terms
from .transport import Pending, Tag


class OwnHop:
    """See `hops.Hop`. Rows without a slot land too, and carry nothing."""

    def send(self, rows: Rows, *, tag: Tag, terms: Terms) -> Pending[Landed]:  # noqa: ARG002  # the protocol's
        return Pending.ready(Landed(rows, None))

    def back_rows(self, sums: Sums, trail: None, *, tag: Tag) -> Pending[Sums]:  # noqa: ARG002
        return Pending.ready(sums)

    def back_pairs(self, pairs: PairRows, trail: None, *, tag: Tag) -> Pending[PairRows]:  # noqa: ARG002
        return Pending.ready(pairs)
