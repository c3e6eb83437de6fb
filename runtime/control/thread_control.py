"""The control plane of ranks that are threads of one process: their transport carries the votes too.

For the protocol see `control`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep import Kind, Pending, Tag, Transport


class ThreadControl:
    """One rank's end; the transport stays its owner's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.size = transport.size

    def gather(self, row: Sequence[int], *, sequence: int) -> Pending[list[list[int]]]:
        tag = Tag(step=sequence, layer=-1, track=0, round=0, kind=Kind.VOTE)
        return self._transport.all_gather(torch.tensor(row, dtype=torch.int64), tag=tag).then(Tensor.tolist)

    def close(self) -> None:
        """Nothing of its own to close."""
