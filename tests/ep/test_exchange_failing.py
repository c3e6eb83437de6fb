"""An exchange that cannot be right ends on all ranks and names the culprit."""

from __future__ import annotations

import pytest
import torch

from ep import Kind, PeerFailed, Tag, TagMismatch, Terms, run_ranks
from ep.tags import check_tags
from ep.wrapping import Wrapping

TAG = Tag(0, 0, 0, 0, Kind.CHECK)
TERMS = Terms(bucket=1024)


class Blind(Wrapping):
    """A transport that compares no tags: it shows the group the same one always."""

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        return self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=TAG)

    def all_gather(self, row, *, tag):
        return self._transport.all_gather(row, tag=TAG)


@pytest.mark.parametrize(("size", "culprit"), [(2, 1), (4, 2)])
def test_the_header_finds_a_rank_out_of_step_on_a_transport_that_does_not(make, size, culprit):
    def fn(transport):
        exchange = make(Blind(transport), num_slots=size)
        x, slots, weights = (
            torch.zeros(0, 4, dtype=torch.float64),
            torch.zeros(0, 2, dtype=torch.int64),
            torch.zeros(0, 2),
        )
        tag = TAG._replace(layer=int(transport.rank == culprit))
        with pytest.raises(TagMismatch) as raised:
            exchange.dispatch(x, slots, weights.double(), tag=tag, terms=TERMS)
        return raised.value

    for rank, error in enumerate(run_ranks(size, fn, timeout_s=20)):
        assert (error.culprit, error.rank) == (culprit, rank)
        assert (error.expected.layer, error.found.layer, error.found.kind) == (0, 1, Kind.HEADER)


def test_a_header_that_is_no_header_is_shown_as_it_is():
    with pytest.raises(TagMismatch, match=r"rank 1 is out of step: .*found kind 77\(step 9, layer 9"):
        check_tags([(0, 0, 0, 0, 1), (9, 9, 9, 9, 77), (0, 0, 0, 0, 1)], rank=0)


@pytest.mark.parametrize("between", [False, True], ids=["inside dispatch", "between dispatch and combine"])
def test_a_rank_that_fails_in_an_exchange_is_named_by_all_others(make, errors_of, between):
    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=1)
        bad = transport.rank == 1
        x = torch.zeros(2, 5 if bad and not between else 4, dtype=torch.float64)
        slots, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.float64)
        arrivals = exchange.dispatch(x, slots, weights, tag=TAG, terms=TERMS).wait()
        if bad:
            raise ArithmeticError("expert")
        exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    errors, raised = errors_of(3, fn)
    assert isinstance(raised, ArithmeticError if between else AssertionError)
    assert all(isinstance(errors[rank], PeerFailed) and errors[rank].culprit == 1 for rank in (0, 2))


def test_more_tokens_than_a_round_takes_is_our_own_mistake(make, errors_of):
    def fn(transport):
        exchange = make(transport, num_slots=1, top_k=1, round_tokens=2)
        slots, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.float64)
        exchange.dispatch(torch.zeros(3, 4, dtype=torch.float64), slots, weights, tag=TAG, terms=TERMS)

    _, raised = errors_of(1, fn)
    assert str(raised).startswith("(3, 2)")
