"""Tokens reach their slots and come back as the dense sum says; where slots sit changes nothing in mode `slots`."""

from __future__ import annotations

import pytest
import torch

from ep import ExchangeConfig, Kind, Tag, Terms, Topology, run_ranks
from ep.blueprint import Blueprint
from ep.conformance import ROUTINGS, check_exchange, exchange_batch, expert, make_batch

LIMIT_S = 30
MODES = ("ranks", "slots")
TAG = Tag(0, 0, 0, 0, Kind.CHECK)
TERMS = Terms(bucket=1024)


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_routing_in_several_rounds_equals_the_dense_sum(size, dtype, combine):
    config = ExchangeConfig(exchange="exact", hierarchical="off", combine=combine, round_tokens=4)
    run_ranks(size, lambda transport: check_exchange(transport, config=config, dtype=dtype), timeout_s=LIMIT_S)


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize(("size", "top_ks"), [(8, (1, 16)), (64, (8,))])
def test_many_ranks_equal_the_dense_sum_too(size, top_ks, combine):
    routings = ROUTINGS if size == 8 else ("one slot", "masked")

    def check(transport):
        config = ExchangeConfig(exchange="exact", hierarchical="off", combine=combine, round_tokens=11)
        with torch.inference_mode():
            check_exchange(
                transport, config=config, dtype=torch.float64, top_ks=top_ks, routings=routings, slots_per_rank=2
            )

    run_ranks(size, check, timeout_s=LIMIT_S)


def results_under(make, placement: torch.Tensor, size: int, *, top_k: int = 6, combine: str = "slots") -> torch.Tensor:
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
        for number, part in enumerate(exchange.round_slices(own.stop - own.start, Terms(bucket=-(-29 // size)))):
            tag = TAG._replace(round=number)
            x, slots, weights = x_GD[own][part], placement[experts_GK[own][part]], weights_GK[own][part]
            arrivals = exchange.dispatch(x, slots, weights, tag=tag, terms=TERMS).wait()
            experts_M = expert_of_slot[arrivals.slots_M + transport.rank * exchange.slots_per_rank]
            y = expert(arrivals.x_ND[arrivals.rows_M], experts_M)
            outputs.append(exchange.combine(y, arrivals, tag=tag).wait())
        return torch.cat(outputs)

    return torch.cat(run_ranks(size, fn, timeout_s=LIMIT_S))


def test_in_mode_slots_neither_placement_nor_ranks_change_a_bit_in_bf16(make):
    placements = [torch.arange(24), torch.arange(24).flip(0), torch.randperm(24, generator=torch.Generator())]
    truth = results_under(make, placements[0], 1)
    for size in (1, 2, 3, 8, 24):
        for placement in placements:
            assert torch.equal(results_under(make, placement, size), truth), (size, placement)


def test_the_placement_test_would_see_a_difference_in_mode_ranks(make):
    truth = results_under(make, torch.arange(24), 1, combine="ranks")
    assert not torch.equal(results_under(make, torch.arange(24), 8, combine="ranks"), truth)


@pytest.mark.parametrize("combine", MODES)
def test_the_sum_of_small_and_large_keeps_what_the_wide_dtype_holds(make, combine):
    """1 + 2^-9 + 2^-9 in the run dtype loses both small ones; added wide and rounded once it does not."""

    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=3, dtype=torch.bfloat16, combine=combine)
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        weights = torch.tensor([[1.0, 2.0**-8, 2.0**-8]])
        arrivals = exchange.dispatch(x, torch.tensor([[0, 1, 2]]), weights, tag=TAG, terms=TERMS).wait()
        return exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    assert torch.equal(run_ranks(1, fn)[0], torch.full((1, 4), 1 + 2.0**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("values", "combine", "size", "expected"),
    [
        ((1e16, 1.0, -1e16), "ranks", 3, 0.0),
        ((1e16, 1.0, -1e16), "slots", 3, 1.0),
        ((1e16, 1.0, -1e16), "ranks", 1, 1.0),
        ((1e16, 1.0, -1e16), "slots", 1, 1.0),
        ((1e16, -1e16, 1.0), "ranks", 3, 1.0),
        ((1e16, -1e16, 1.0), "slots", 3, 0.0),
    ],
)
def test_the_order_of_the_sum_is_ranks_in_between_and_top_k_within(make, values, combine, size, expected):
    """A token asks for slots 2, 0, 1, one a rank. Of 1e16, 1 and -1e16 the 1 survives only if it is added last."""

    def fn(transport):
        exchange = make(transport, num_slots=3, hidden=1, top_k=3, combine=combine)
        slots, weights = torch.tensor([[2, 0, 1]]), torch.ones(1, 3, dtype=torch.float64)
        arrivals = exchange.dispatch(
            torch.zeros(1, 1, dtype=torch.float64), slots, weights, tag=TAG, terms=TERMS
        ).wait()
        values_L = torch.tensor(values, dtype=torch.float64)
        y = values_L[arrivals.slots_M + transport.rank * exchange.slots_per_rank][:, None]
        return exchange.combine(y, arrivals, tag=TAG).wait().item()

    assert run_ranks(size, fn, timeout_s=LIMIT_S) == [expected] * size


@pytest.mark.parametrize("combine", MODES)
def test_products_are_not_rounded_before_they_are_added(make, combine):
    """(1 + e)(1 + e) - (1 + e) = e + e^2; the first product rounded to bf16 would leave e."""
    e = 2.0**-7

    def fn(transport):
        exchange = make(transport, num_slots=2, dtype=torch.bfloat16, combine=combine)
        x = torch.full((1, 4), 1 + e, dtype=torch.bfloat16)
        arrivals = exchange.dispatch(
            x, torch.tensor([[0, 1]]), torch.tensor([[1 + e, -1.0]]), tag=TAG, terms=TERMS
        ).wait()
        return exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    assert torch.equal(run_ranks(1, fn)[0], torch.full((1, 4), e + e * e, dtype=torch.bfloat16))


def test_float64_is_not_made_narrower_anywhere(make):
    def fn(transport):
        exchange = make(transport, num_slots=2, top_k=1)
        x = torch.full((1, 4), 1 + 2.0**-50, dtype=torch.float64)
        weights = torch.full((1, 1), 1 - 2.0**-51, dtype=torch.float64)
        arrivals = exchange.dispatch(x, torch.tensor([[1 - transport.rank]]), weights, tag=TAG, terms=TERMS).wait()
        assert arrivals.weights_M.item() == 1 - 2.0**-51
        return exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()

    for out in run_ranks(2, fn):
        assert torch.equal(out, torch.full((1, 4), (1 + 2.0**-50) * (1 - 2.0**-51), dtype=torch.float64))


@pytest.mark.parametrize("combine", MODES)
def test_two_tracks_in_flight_do_not_touch_each_other(make, combine):
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
            exchange.dispatch(batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], tag=tag, terms=TERMS)
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


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_inputs_may_be_views_of_any_stride(make, combine, num_tokens):
    """Column slices, transposed and broadcast tensors; with 0 or 1 token their strides mean nothing."""

    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=1, hidden=3, combine=combine)
        x = torch.arange(30, dtype=torch.float64).view(3, 10).t()[:num_tokens]
        slots = torch.tensor([[2, 7]])[:, :1].expand(num_tokens, 1)
        weights = torch.tensor([0.5], dtype=torch.float64)[:, None].expand(num_tokens, 1)
        arrivals = exchange.dispatch(x, slots, weights, tag=TAG, terms=TERMS).wait()
        y = arrivals.x_ND[arrivals.rows_M].t().contiguous().t()
        assert torch.equal(exchange.combine(y, arrivals, tag=TAG).wait(), x / 2)
        none = torch.ones(0, 4, dtype=torch.float64)[:, :1]
        assert exchange.dispatch(x[:0], slots[:0], none, tag=TAG, terms=TERMS).wait().rows_M.numel() == 0

    run_ranks(3, fn, timeout_s=LIMIT_S)


def test_rounds_follow_from_the_bucket_alone(make):
    def fn(transport):
        exchange = make(transport, num_slots=2, round_tokens=4)
        assert [exchange.num_rounds(bucket) for bucket in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
        assert exchange.round_slices(6, Terms(bucket=9)) == [slice(0, 4), slice(4, 6), slice(6, 6)]
        assert exchange.round_slices(0, Terms(bucket=5)) == [slice(0, 0), slice(0, 0)]
        assert exchange.round_slices(0, Terms(bucket=0)) == [slice(0, 0)]

    run_ranks(1, fn)


def buffers_of(exchange) -> int:
    """Bytes of every tensor that an exchange holds and that grows with its rows."""
    hops = [hop for exact, bounded in exchange._tracks for hop in (*exact, *bounded)]
    held = {tensor.data_ptr(): tensor for hop in hops for tensor in (hop._buffers.out, hop._buffers.into)}
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize(("dtype", "hidden", "top_k"), [(torch.bfloat16, 7, 3), (torch.float64, 4, 1)])
def test_the_bytes_told_are_the_bytes_taken(make, combine, dtype, hidden, top_k):
    config = ExchangeConfig(exchange="exact", hierarchical="off", combine=combine, round_tokens=6)

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
        return buffers_of(exchange)

    blueprint = Blueprint(
        topology=Topology(num_ranks=3, node_size=3), num_slots=3, hidden=hidden, top_k=top_k, dtype=dtype, config=config
    )
    assert run_ranks(3, fn) == [2 * blueprint.num_bytes] * 3


def test_the_largest_round_takes_no_memory_but_the_buffers_and_its_sums(make):
    """All tokens of all ranks to one rank: every row fits, and the next round reuses the same bytes."""

    def fn(transport):
        exchange = make(transport, num_slots=3, top_k=1, round_tokens=8)
        places = set()
        for number in range(3):
            x = torch.randn(8, 4, dtype=torch.float64)
            tag = TAG._replace(round=number)
            slots, weights = torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1, dtype=torch.float64)
            arrivals = exchange.dispatch(x, slots, weights, tag=tag, terms=TERMS).wait()
            assert arrivals.x_ND.shape[0] == (24 if transport.rank == 0 else 0)
            places.add(arrivals.x_ND.data_ptr() if arrivals.x_ND.numel() else 0)
            assert torch.equal(exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=tag).wait(), x)
        return len(places)

    assert run_ranks(3, fn, timeout_s=LIMIT_S) == [1, 1, 1]


def test_the_largest_round_of_the_widest_rows_can_be_counted():
    config = ExchangeConfig(exchange="exact", hierarchical="off", round_tokens=1 << 20)
    blueprint = Blueprint(
        topology=Topology(num_ranks=1 << 14, node_size=1 << 14), num_slots=1 << 14, hidden=1 << 20, top_k=1 << 14,
        dtype=torch.float64, config=config,
    )  # fmt: skip
    assert blueprint.num_bytes > 1 << 56
