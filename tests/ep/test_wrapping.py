"""A wrapper is a transport before it changes anything, and changes no more than it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep import Kind, Pending, Tag, run_ranks
from ep.conformance import check_transport
from ep.wrapping import Wrapping

TAG = Tag(step=4, layer=3, track=1, round=2, kind=Kind.CHECK)


class Noting:
    """A transport of rank 2 of 5 that notes what it is asked, and answers each call with its name."""

    rank, size = 2, 5

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def all_to_all(self, *tensors: Any, **how: Any) -> str:
        self.calls.append(("all_to_all", *tensors, how))
        return "rows to all"

    def all_gather(self, *tensors: Any, **how: Any) -> str:
        self.calls.append(("all_gather", *tensors, how))
        return "rows of all"

    def abort(self, cause: BaseException) -> None:
        self.calls.append(("abort", cause))

    def close(self) -> None:
        self.calls.append(("close",))


class Doubling(Wrapping):
    """Twice what was gathered."""

    def all_gather(self, row: torch.Tensor, *, tag: Tag) -> Pending[torch.Tensor]:
        return super().all_gather(row, tag=tag).then(lambda rows: 2 * rows)


@pytest.mark.parametrize("size", [1, 3])
def test_it_passes_what_any_transport_must(size: int):
    run_ranks(size, lambda transport: check_transport(Wrapping(transport)), timeout_s=20.0)


def test_all_that_is_asked_goes_to_the_one_inside_as_it_is():
    inner, cause = Noting(), ValueError("it ends here")
    wrapped: Any = Wrapping(inner)  # type: ignore[arg-type]
    splits = {"recv_splits": [0, 0, 1, 0, 0], "send_splits": [0, 1, 0, 0, 0]}
    assert (wrapped.rank, wrapped.size) == (2, 5)
    assert wrapped.all_to_all("into", "out of", **splits, tag=TAG) == "rows to all"
    assert wrapped.all_gather("row", tag=TAG) == "rows of all"
    wrapped.abort(cause)
    wrapped.close()
    assert inner.calls == [
        ("all_to_all", "into", "out of", {**splits, "tag": TAG}),
        ("all_gather", "row", {"tag": TAG}),
        ("abort", cause),
        ("close",),
    ]


def test_who_changes_one_call_leaves_the_others_as_they_were():
    def run(transport):
        doubling, ones = Doubling(transport), (1,) * transport.size
        mine = torch.full((transport.size, 1), transport.rank)
        sent = doubling.all_to_all(torch.empty_like(mine), mine, recv_splits=ones, send_splits=ones, tag=TAG).wait()
        return sent.flatten().tolist(), doubling.all_gather(mine[0], tag=TAG).wait().flatten().tolist()

    assert run_ranks(3, run, timeout_s=20.0) == [([0, 1, 2], [0, 2, 4])] * 3
