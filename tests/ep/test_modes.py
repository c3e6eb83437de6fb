"""Exact and bounded, flat and over nodes, both ways back: the same rows arrive, the same sums come back."""

from __future__ import annotations

import itertools

import pytest
import torch

from ep import CapacityPlan, ExchangeConfig, Kind, Tag, Terms, Topology, run_ranks
from ep.blueprint import Blueprint
from ep.conformance import check_exchange, exchange_batch, expert, make_batch
from ep.fullest import chance_of_part

LIMIT_S = 30
MODES = list(itertools.product(("exact", "bounded"), ("off", "on"), ("ranks", "slots")))
TAG = Tag(0, 0, 0, 0, Kind.CHECK)
PLENTY = 1 << 20


def roomy(exchange: str, hierarchical: str, combine: str, number: int = PLENTY) -> CapacityPlan | None:
    """Blocks in which everything fits, so that what is compared is all there."""
    if exchange == "exact":
        return None
    back = number if combine == "slots" else None
    return CapacityPlan.fixed(number, num_hops=2 if hierarchical == "on" else 1, combine=back)


def check(size: int, node_size: int, mode: tuple[str, str, str], **how) -> None:
    exchange, hierarchical, combine = mode
    config = ExchangeConfig(
        exchange=exchange, hierarchical=hierarchical, combine=combine, round_tokens=how.pop("round_tokens", 12)
    )
    how = {"dtype": torch.float64, "plan": roomy(*mode), "top_ks": (4,), "slots_per_rank": 2} | how
    run_ranks(
        size,
        lambda transport: check_exchange(transport, config=config, node_size=node_size, **how),
        timeout_s=LIMIT_S,
    )


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_four_ranks_on_any_nodes_equal_the_dense_sum_in_all_modes(mode, node_size):
    check(4, node_size, mode)


@pytest.mark.parametrize(
    ("size", "node_size", "mode"),
    [
        (size, node_size, MODES[(3 * number + offset) % len(MODES)])
        for number, (size, node_size) in enumerate([(1, 1), (2, 2), (3, 1), (5, 5), (6, 2), (6, 3), (8, 2), (9, 3)])
        for offset in (0, 1)
    ],
)
def test_other_numbers_of_ranks_do_too(size, node_size, mode):
    check(size, node_size, mode, round_tokens=7, routings=("spread", "one node", "masked", "idle"))


@pytest.mark.parametrize(("size", "node_size"), [(12, 4), (16, 4)])
@pytest.mark.parametrize("mode", [("bounded", "on", "slots"), ("exact", "on", "ranks")], ids="-".join)
def test_many_ranks_do_too(size, node_size, mode):
    check(size, node_size, mode, routings=("few nodes", "one rank"), top_ks=(6,))


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("size", "node_size"), [(size, nodes) for size in range(1, 17) for nodes in (1, 2, 4) if size % nodes == 0]
)
def test_every_number_of_ranks_does_in_every_mode(size, node_size, mode):
    check(size, node_size, mode, routings=("spread", "one slot", "one rank", "one node", "masked", "idle"), top_ks=(3,))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_twenty_repeats_bring_the_same_bytes_and_many_copies_of_a_slot_are_ordinary(mode):
    check(4, 2, mode, routings=("spread",), repeats=20, dtype=torch.bfloat16)
    check(2, 1, mode, routings=("spread",), top_ks=(7,), slots_per_rank=1)


@pytest.mark.parametrize("combine_dtype", ["run", "float32"])
@pytest.mark.parametrize("mode", MODES[1::2], ids="-".join)
def test_fp8_rows_arrive_as_they_were_made_narrower_at_the_source(mode, combine_dtype):
    """Also after a second hop: what passes a gateway is not made narrower again."""
    exchange, hierarchical, combine = mode
    config = ExchangeConfig(
        exchange=exchange,
        hierarchical=hierarchical,
        combine=combine,
        dispatch_dtype="fp8",
        combine_dtype=combine_dtype,
    )

    def fn(transport):
        check_exchange(
            transport,
            config=config,
            dtype=torch.bfloat16,
            node_size=2,
            plan=roomy(*mode),
            top_ks=(3,),
            hidden=200,
            routings=("spread", "one slot", "masked"),
        )

    run_ranks(4, fn, timeout_s=LIMIT_S)


@pytest.mark.parametrize("combine_dtype", ["run", "float32"])
def test_a_sum_in_two_parts_keeps_float32_on_the_way_if_asked(make, combine_dtype):
    """1 + 2^-9 on rank 0 and 2^-9 on rank 1: in bf16 the first part loses its small one on the way."""

    def fn(transport):
        exchange = make(
            transport,
            num_slots=4,
            top_k=3,
            dtype=torch.bfloat16,
            combine_dtype=combine_dtype,
            node_size=1,
            hierarchical="on",
        )
        weights = torch.tensor([[1.0, 2.0**-8, 2.0**-8]])
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        terms = Terms(bucket=1)
        arrivals = exchange.dispatch(x, torch.tensor([[0, 1, 2]]), weights, tag=TAG, terms=terms).wait()
        return exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()[0, 0].item()

    assert run_ranks(2, fn, timeout_s=LIMIT_S) == [1 + 2.0**-7 if combine_dtype == "float32" else 1.0] * 2


def placed(make, mode: tuple[str, str], placement: torch.Tensor, size: int, node_size: int) -> torch.Tensor:
    """[29, D] bf16 of 29 tokens over 24 experts, expert e in slot placement[e], tokens spread over `size` ranks."""
    generator = torch.Generator().manual_seed(5)
    x_GD = torch.randn(29, 33, generator=generator).to(torch.bfloat16)
    experts_GK = torch.rand(29, 24, generator=generator).argsort(1)[:, :6]
    weights_GK = torch.rand(29, 6, generator=generator)
    expert_of_slot = placement.argsort()
    exchange_mode, hierarchical = mode

    def fn(transport):
        own = slice(29 * transport.rank // size, 29 * (transport.rank + 1) // size)
        exchange = make(
            transport,
            num_slots=24,
            hidden=33,
            top_k=6,
            dtype=torch.bfloat16,
            combine="slots",
            round_tokens=5,
            exchange=exchange_mode,
            hierarchical=hierarchical,
            node_size=node_size,
            plan=roomy(*mode, "slots"),
        )
        outputs, terms = [], Terms(bucket=-(-29 // size))
        for number, part in enumerate(exchange.round_slices(own.stop - own.start, terms)):
            tag = TAG._replace(round=number)
            x, slots, weights = x_GD[own][part], placement[experts_GK[own][part]], weights_GK[own][part]
            arrivals = exchange.dispatch(x, slots, weights, tag=tag, terms=terms).wait()
            experts_M = expert_of_slot[arrivals.slots_M + transport.rank * exchange.slots_per_rank]
            outputs.append(
                exchange.combine(expert(arrivals.x_ND[arrivals.rows_M], experts_M), arrivals, tag=tag).wait()
            )
        return torch.cat(outputs)

    return torch.cat(run_ranks(size, fn, timeout_s=LIMIT_S))


def test_in_mode_slots_no_placement_no_ranks_no_nodes_and_no_mode_change_a_bit_in_bf16(make):
    placements = [torch.arange(24), torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    truth = placed(make, ("exact", "off"), placements[0], 1, 1)
    for mode in itertools.product(("exact", "bounded"), ("off", "on")):
        for size, node_size in ((2, 1), (3, 3), (6, 2), (8, 4)):
            for placement in placements:
                assert torch.equal(placed(make, mode, placement, size, node_size), truth), (mode, size, node_size)


def run_uniform(make, topology: Topology, *, num_tokens: int, slots_per_rank: int, top_k: int, hidden: int, **config):
    """One exchange of uniform random routing; what each rank sent there alone, and a row's bytes."""
    num_slots = topology.num_ranks * slots_per_rank

    def fn(transport):
        exchange = make(
            transport,
            num_slots=num_slots,
            hidden=hidden,
            top_k=top_k,
            dtype=torch.bfloat16,
            round_tokens=num_tokens,
            node_size=topology.node_size,
            **config,
        )
        generator = torch.Generator().manual_seed(transport.rank)
        slots = torch.rand(num_tokens, num_slots, generator=generator).topk(top_k, dim=1).indices
        x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
        weights = torch.ones(num_tokens, top_k)
        arrivals = exchange.dispatch(x, slots, weights, tag=TAG, terms=Terms(bucket=num_tokens)).wait()
        there = exchange.take_bytes()
        exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=TAG).wait()
        return there, exchange.take_bytes(), exchange._blueprint.row.num_bytes

    return run_ranks(topology.num_ranks, fn, timeout_s=LIMIT_S)


def test_over_nodes_the_network_carries_what_the_formula_says_within_two_percent(make):
    """8 ranks as 4 nodes of 2, top-6 of 64: (M - 1) * (1 - C(E - E/M, k) / C(E, k)) remote nodes a token, both ways."""
    topology = Topology(num_ranks=8, node_size=2)
    num_tokens, hidden = 400, 128
    sent = run_uniform(
        make, topology, num_tokens=num_tokens, slots_per_rank=8, top_k=6, hidden=hidden, hierarchical="on"
    )
    rows = 8 * num_tokens * 3 * chance_of_part(64, 4, 6)
    there, back = (sum(taken[way].network for taken in sent) for way in (0, 1))
    assert there == pytest.approx(rows * sent[0][2], rel=0.02)
    assert back == pytest.approx(rows * 2 * hidden, rel=0.02)


def test_without_nodes_the_network_carries_a_row_for_each_rank(make):
    topology = Topology(num_ranks=8, node_size=2)
    sent = run_uniform(make, topology, num_tokens=400, slots_per_rank=8, top_k=6, hidden=128)
    rows = 8 * 400 * chance_of_part(64, 8, 6)
    for way, row_bytes in ((0, sent[0][2]), (1, 256)):
        assert sum(taken[way].network for taken in sent) == pytest.approx(6 * rows * row_bytes, rel=0.02)
        assert sum(taken[way].node for taken in sent) == pytest.approx(1 * rows * row_bytes, rel=0.02)


def test_bounded_blocks_weigh_the_same_whatever_is_in_them(make):
    """One node of 3, 5 tokens: two blocks leave, each a header and 5 places, both ways."""
    topology = Topology(num_ranks=3, node_size=3)
    for there, back, row_bytes in run_uniform(
        make, topology, num_tokens=5, slots_per_rank=2, top_k=2, hidden=128, exchange="bounded"
    ):
        assert (there.network, there.node) == (0, 2 * 6 * row_bytes)
        assert (back.network, back.node) == (0, 2 * 6 * 256)


def buffers_of(exchange) -> dict[int, torch.Tensor]:
    """Every tensor that an exchange holds and that grows with its rows, by where it lies."""
    hops = [hop for exact, bounded in exchange._tracks for hop in (*exact, *bounded)]
    return {tensor.data_ptr(): tensor for hop in hops for tensor in (hop._buffers.out, hop._buffers.into)}


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("dtypes", [("run", "run"), ("fp8", "float32")], ids="-".join)
def test_the_bytes_told_are_the_bytes_taken(make, mode, dtypes):
    exchange, hierarchical, combine = mode
    fields = {
        "exchange": exchange,
        "hierarchical": hierarchical,
        "combine": combine,
        "round_tokens": 6,
        "dispatch_dtype": dtypes[0],
        "combine_dtype": dtypes[1],
    }
    sizes = {"num_slots": 12, "hidden": 9, "top_k": 3, "dtype": torch.bfloat16}

    def fn(transport):
        built = make(transport, **sizes, node_size=2, num_tracks=2, **fields)
        return sum(tensor.untyped_storage().nbytes() for tensor in buffers_of(built).values())

    topology = Topology(num_ranks=4, node_size=2)
    blueprint = Blueprint(topology=topology, config=ExchangeConfig(**fields), **sizes)
    assert run_ranks(4, fn) == [2 * blueprint.num_bytes] * 4


@pytest.mark.parametrize("hierarchical", ["off", "on"])
def test_exact_rounds_of_8192_tokens_to_one_rank_stay_within_the_buffers(make, hierarchical):
    """Everything that arrives lies in memory that was there before, round after round, on the fullest rank too."""

    def fn(transport):
        exchange = make(
            transport,
            num_slots=4,
            hidden=16,
            top_k=1,
            dtype=torch.bfloat16,
            round_tokens=1024,
            node_size=2,
            hierarchical=hierarchical,
        )
        ends = {begin: begin + tensor.nbytes for begin, tensor in buffers_of(exchange).items()}
        terms, arrived = Terms(bucket=8192), 0
        x = torch.randn(8192, 16).to(torch.bfloat16)
        slots, weights = torch.full((8192, 1), 3), torch.ones(8192, 1)
        for number, part in enumerate(exchange.round_slices(8192, terms)):
            tag = TAG._replace(round=number)
            arrivals = exchange.dispatch(x[part], slots[part], weights[part], tag=tag, terms=terms).wait()
            arrived += arrivals.x_ND.shape[0]
            place = arrivals.x_ND.data_ptr()
            size = arrivals.x_ND.shape[0] * exchange._blueprint.row.num_bytes
            if size:
                first = max(begin for begin in ends if begin <= place)
                assert place - exchange._blueprint.row.begins[3] + size <= ends[first]
            out = exchange.combine(arrivals.x_ND[arrivals.rows_M], arrivals, tag=tag).wait()
            assert torch.equal(out, x[part])
        return arrived

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [0, 0, 0, 4 * 8192]


def test_two_tracks_in_flight_on_two_hops_keep_apart(make):
    """Both dispatched before either is waited for: the second hops start in the order of the waits, on all ranks."""
    topology = Topology(num_ranks=4, node_size=2)

    def fn(transport):
        sizes = {"num_slots": 8, "hidden": 4, "top_k": 2}
        batches = [make_batch("spread", num_ranks=4, seed=seed, dtype=torch.float64, **sizes) for seed in (1, 2)]
        exchange = make(
            transport,
            **sizes,
            node_size=2,
            hierarchical="on",
            exchange="bounded",
            num_tracks=2,
            round_tokens=12,
            plan=roomy("bounded", "on", "ranks"),
        )
        alone = [
            exchange_batch(exchange, batch, rank=transport.rank, step=step, topology=topology)
            for step, batch in enumerate(batches)
        ]
        starts = []
        for track, batch in enumerate(batches):
            own, tag = batch.own(transport.rank), Tag(2, 0, track, 0, Kind.CHECK)
            inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
            starts.append(exchange.dispatch(*inputs, tag=tag, terms=Terms(bucket=12)))
        arrivals = [start.wait() for start in starts]
        first = transport.rank * exchange.slots_per_rank
        backs = [
            exchange.combine(
                expert(each.x_ND[each.rows_M], each.slots_M + first), each, tag=Tag(2, 0, t, 0, Kind.CHECK)
            )
            for t, each in enumerate(arrivals)
        ]
        return [torch.equal(back.wait(), before) for back, before in zip(backs, alone, strict=True)]

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [[True, True]] * 4
