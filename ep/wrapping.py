"""A transport around another: what a wrapper does not say otherwise is done by the one inside.

Knows the protocol; does not know what anybody wraps a transport for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .transport import Pending, Tag, Transport


class Wrapping:
    """To be inherited from by whoever changes some calls of a transport; see `Transport`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.size = transport.size

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `Transport`."""
        return self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        """See `Transport`."""
        return self._transport.all_gather(row, tag=tag)

    def abort(self, cause: BaseException) -> None:
        """See `Transport`."""
        self._transport.abort(cause)

    def close(self) -> None:
        """See `Transport`."""
        self._transport.close()
