"""Tokens reach their slots and come back as the dense sum says; where slots sit changes nothing in mode `slots`."""

from __future__ import annotations

import pytest
import torch

from ep import Exchange, ExchangeConfig, Kind, PeerFailed, Tag, TagMismatch, buffer_bytes, run_ranks, wide
from ep.conformance import ROUTINGS, check_exchange, exchange_batch, expert, make_batch
from ep.exchange import RowFormat, check_tags

LIMIT_S = 30
MODES = ("ranks", "slots")
TAG = Tag(0, 0, 0, 0, Kind.CHECK)


def make(
    transport, *, num_slots, hidden=4, top_k=2, dtype=torch.float64, combine="ranks", round_tokens=8, num_tracks=1
):
    config = ExchangeConfig(combine=combine, round_tokens=round_tokens)
    return Exchange(
        transport,
        num_slots=num_slots,
        hidden=hidden,
        top_k=top_k,
        dtype=dtype,
        device="cpu",
        config=config,
        num_tracks=num_tracks,
    )


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_routing_in_several_rounds_equals_the_dense_sum(size, dtype, combine):
    config = ExchangeConfig(combine=combine, round_tokens=4)
    run_ranks(size, lambda transport: check_exchange(transport, config=config, dtype=dtype), timeout_s=LIMIT_S)


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize(("size", "top_ks"), [(8, (1, 16)), (64, (8,))])
def test_many_ranks_equal_the_dense_sum_too(size, top_ks, combine):
    routings = ROUTINGS if size == 8 else ("one slot", "masked")

    def check(transport):
        config = ExchangeConfig(combine=combine, round_tokens=11)
        with torch.inference_mode():
            check_exchange(
                transport, config=config, dtype=torch.float64, top_ks=top_ks, routings=routings, slots_per_rank=2
            )

    run_ranks(size, check, timeout_s=LIMIT_S)


def results_under(placement: torch.Tensor, size: int, *, top_k: int = 6, combine: str = "slots") -> torch.Tensor:
    """[G, D] bf16 of 29 tokens over 24 experts, expert e in slot placement[e], tokens spread over `size` ranks."""
    generator = torch.Generator().manual_seed(5)
    x_GD = torch.randn(29, 33, generator=generator).to(torch.bfloat16)
    experts_GK = torch.rand(29, 24, generator=generator).argsort(1)[:, :top_k]
    weights_GK = torch.rand(29, top_k, generator=generator)
    expert_of_slot = placement.argsort()

    def fn(transport):
        own = slice(29 * transport.rank // size, 29 * (transport.rank + 1) // size)
        exchange = make(
            transport, num_slots=24, hidden=33, top_k=top_k, dtype=torch.bfloat16, combine=combine, round_tokens=5
        )
        outputs = []
        for number, part in enumerate(exchange.round_slices(own.stop - own.start, -(-29 // size))):
            tag = TAG._replace(round=number)
            x, slots, weights = x_GD[own][part], placement[experts_GK[own][part]], weights_GK[own][part]
            arrivals = exchange.dispatch(x, slots, weights, tag=tag).wait()
            experts_M = expert_of_slot[arrivals.slots_M + transport.rank * exchange.slots_per_rank]
            y = expert(arrivals.x_ND[arrivals.rows_M], experts_M)
            outputs.append(exchange.combine(y, arrivals, tag=tag).wait())
        return torch.cat(outputs)

    return torch.cat(run_ranks(size, fn, timeout_s=LIMIT_S))


def test_in_mode_slots_neither_placement_nor_ranks_change_a_bit_in_bf16():
    placements = [torch.arange(24), torch.arange(24).flip(0), torch.randperm(24, generator=torch.Generator())]
    truth = results_under(placements[0], 1)
    for size in (1, 2, 3, 8, 24):
        for placement in placements:
            assert torch.equal(results_under(placement, size), truth), (size, placement)


def test_the_placement_test_would_see_a_difference_in_mode_ranks():
    truth = results_under(torch.arange(24), 1, combine="ranks")
    assert not torch.equal(results_under(torch.arange(24), 8, combine="ranks"), truth)


@pytest.mark.parametrize("combine", MODES)
def test_the_sum_of_small_and_large_keeps_what_the_wide_dtype_holds(combine):
    """1 + 2^-9 + 2^-9 in the run dtype loses both small ones; added wide and rounded once it does not."""

    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=3, dtype=torch.bfloat16, combine=combine)
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        weights = torch.tensor([[1.0, 2.0**-8, 2.0**-8]])
        arrivals = exchange.dispatch(x, torch.tensor([[0, 1, 2]]), weights, tag=TAG).wait()
        return exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    assert torch.equal(run_ranks(1, fn)[0], torch.full((1, 4), 1 + 2.0**-7, dtype=torch.bfloat16))


def test_float64_is_not_made_narrower_anywhere():
    def fn(transport):
        exchange = make(transport, num_slots=2, top_k=1)
        x = torch.full((1, 4), 1 + 2.0**-50, dtype=torch.float64)
        weights = torch.full((1, 1), 1 - 2.0**-51, dtype=torch.float64)
        arrivals = exchange.dispatch(x, torch.tensor([[1 - transport.rank]]), weights, tag=TAG).wait()
        assert arrivals.weights_M.item() == 1 - 2.0**-51
        return exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    for out in run_ranks(2, fn):
        assert torch.equal(out, torch.full((1, 4), (1 + 2.0**-50) * (1 - 2.0**-51), dtype=torch.float64))


@pytest.mark.parametrize("combine", MODES)
def test_two_tracks_in_flight_do_not_touch_each_other(combine):
    """Both dispatched before either arrives, combined in the other order; the same as one after the other."""
    batches = [
        make_batch("masked", num_ranks=3, num_slots=6, hidden=5, top_k=3, dtype=torch.float32, seed=seed)
        for seed in (1, 2)
    ]

    def fn(transport):
        exchange = make(
            transport,
            num_slots=6,
            hidden=5,
            top_k=3,
            dtype=torch.float32,
            combine=combine,
            round_tokens=12,
            num_tracks=2,
        )
        alone = [exchange_batch(exchange, batch, rank=transport.rank, step=n) for n, batch in enumerate(batches)]
        owns = [batch.own(transport.rank) for batch in batches]
        tags = [Tag(2, 0, track, 0, Kind.CHECK) for track in (0, 1)]
        starts = [
            exchange.dispatch(batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], tag=tag)
            for batch, own, tag in zip(batches, owns, tags, strict=True)
        ]
        arrivals = [start.wait() for start in starts]
        first_slot = transport.rank * exchange.slots_per_rank
        returns = [
            exchange.combine(
                expert(arrivals[track].x_ND[arrivals[track].rows_M], arrivals[track].slots_M + first_slot),
                arrivals[track],
                tag=tags[track],
            )
            for track in (1, 0)
        ]
        together = [pending.wait() for pending in returns][::-1]
        return [torch.equal(a, b) for a, b in zip(alone, together, strict=True)]

    assert run_ranks(3, fn, timeout_s=LIMIT_S) == [[True, True]] * 3


def test_rounds_follow_from_the_bucket_alone():
    def fn(transport):
        exchange = make(transport, num_slots=2, round_tokens=4)
        assert [exchange.num_rounds(bucket) for bucket in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
        assert exchange.round_slices(6, 9) == [slice(0, 4), slice(4, 6), slice(6, 6)]
        assert exchange.round_slices(0, 5) == [slice(0, 0), slice(0, 0)]
        assert exchange.round_slices(0, 0) == [slice(0, 0)]

    run_ranks(1, fn)


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize(("dtype", "hidden", "top_k"), [(torch.bfloat16, 7, 3), (torch.float64, 4, 1)])
def test_the_bytes_told_are_the_bytes_taken(combine, dtype, hidden, top_k):
    config = ExchangeConfig(combine=combine, round_tokens=6)

    def fn(transport):
        exchange = make(
            transport,
            num_slots=3,
            hidden=hidden,
            top_k=top_k,
            dtype=dtype,
            combine=combine,
            round_tokens=6,
            num_tracks=2,
        )
        buffers = [tensor for track in exchange._tracks for tensor in vars(track).values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in buffers)

    told = buffer_bytes(num_ranks=3, hidden=hidden, top_k=top_k, dtype=dtype, config=config, num_tracks=2)
    assert run_ranks(3, fn) == [told] * 3


def test_the_largest_round_takes_no_memory_but_the_buffers_and_its_sums():
    """All tokens of all ranks to one rank: every row fits, and the next round reuses the same bytes."""

    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=1, round_tokens=8)
        places = set()
        for number in range(3):
            x = torch.randn(8, 4, dtype=torch.float64)
            tag = TAG._replace(round=number)
            slots, weights = torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1, dtype=torch.float64)
            arrivals = exchange.dispatch(x, slots, weights, tag=tag).wait()
            assert arrivals.x_ND.shape[0] == (24 if transport.rank == 0 else 0)
            places.add(arrivals.x_ND.data_ptr() if arrivals.x_ND.numel() else 0)
            assert torch.equal(exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=tag).wait(), x)
        return len(places)

    assert run_ranks(3, fn, timeout_s=LIMIT_S) == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("hidden", "top_k"), [(1, 1), (7, 3), (64, 8)])
def test_the_fields_of_a_row_are_aligned_and_follow_each_other(hidden, top_k, dtype):
    row = RowFormat(hidden, top_k, dtype)
    assert row.weights_begin == 8 * top_k
    assert row.x_begin % wide(dtype).itemsize == row.x_begin % dtype.itemsize == row.num_bytes % 8 == 0
    assert row.x_end - row.x_begin == hidden * dtype.itemsize
    assert 0 <= row.num_bytes - row.x_end < 8


# How it fails.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"combine": "rank"}, "combine = 'rank': must be one of ranks, slots, for example ranks"),
        ({"round_tokens": 0}, "round_tokens = 0: must be at least 1, for example 1024"),
    ],
)
def test_a_wrong_config_is_refused_in_words(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ExchangeConfig(**fields)


class Blind:
    """A transport that compares no tags: it shows the group the same one always."""

    def __init__(self, inner):
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        return self._inner.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=TAG)

    def all_gather(self, row, *, tag):
        return self._inner.all_gather(row, tag=TAG)

    def abort(self, cause):
        self._inner.abort(cause)

    def close(self):
        self._inner.close()


@pytest.mark.parametrize(("size", "culprit"), [(2, 1), (4, 2)])
def test_the_header_finds_a_rank_out_of_step_on_a_transport_that_does_not(size, culprit):
    def fn(transport):
        exchange = make(Blind(transport), num_slots=size)
        x, slots, weights = (
            torch.zeros(0, 4, dtype=torch.float64),
            torch.zeros(0, 2, dtype=torch.int64),
            torch.zeros(0, 2),
        )
        tag = TAG._replace(layer=int(transport.rank == culprit))
        with pytest.raises(TagMismatch) as raised:
            exchange.dispatch(x, slots, weights.double(), tag=tag)
        return raised.value

    for rank, error in enumerate(run_ranks(size, fn, timeout_s=LIMIT_S)):
        assert (error.culprit, error.rank) == (culprit, rank)
        assert (error.expected.layer, error.found.layer, error.found.kind) == (0, 1, Kind.HEADER)


def test_a_header_that_is_no_header_is_shown_as_it_is():
    with pytest.raises(TagMismatch, match=r"rank 1 is out of step: .*found kind 77\(step 9, layer 9"):
        check_tags([(0, 0, 0, 0, 1), (9, 9, 9, 9, 77), (0, 0, 0, 0, 1)], rank=0)


@pytest.mark.parametrize("between", [False, True], ids=["inside dispatch", "between dispatch and combine"])
def test_a_rank_that_fails_in_an_exchange_is_named_by_all_others(errors_of, between):
    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=1)
        bad = transport.rank == 1
        x = torch.zeros(2, 5 if bad and not between else 4, dtype=torch.float64)
        slots, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.float64)
        arrivals = exchange.dispatch(x, slots, weights, tag=TAG).wait()
        if bad:
            raise ArithmeticError("expert")
        exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    errors, raised = errors_of(3, fn)
    assert isinstance(raised, ArithmeticError if between else AssertionError)
    assert all(isinstance(errors[rank], PeerFailed) and errors[rank].culprit == 1 for rank in (0, 2))


def test_more_tokens_than_a_round_takes_is_our_own_mistake(errors_of):
    def fn(transport):
        exchange = make(transport, num_slots=1, top_k=1, round_tokens=2)
        slots, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.float64)
        exchange.dispatch(torch.zeros(3, 4, dtype=torch.float64), slots, weights, tag=TAG)

    _, raised = errors_of(1, fn)
    assert str(raised).startswith("(3, 2)")
