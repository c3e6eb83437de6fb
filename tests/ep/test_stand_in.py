"""A rank among others that are not there gets, and gives back, what it would among those that are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep import Exchange, ExchangeConfig, Terms, ThreadGroup, Topology
from ep.blueprint import Blueprint
from ep.capacity import CapacityPlan
from ep.stand_in import StandIn, land, least_level
from ep.terms import MOST_LEVEL
from ep.transport import Kind, Tag

pytestmark = pytest.mark.timeout(120)

RANKS, SLOTS, TOP_K, HIDDEN, TOKENS = 4, 8, 3, 160, 5
TAG = Tag(step=7, layer=0, track=0, round=0, kind=Kind.DISPATCH)
TERMS = Terms(bucket=TOKENS)


def blueprint(*, nodes: int = 1, dtype: str = "run", plan: CapacityPlan | None = None) -> Blueprint:
    config = ExchangeConfig(
        exchange="bounded", hierarchical="on" if nodes > 1 else "off", dispatch_dtype=dtype, round_tokens=TOKENS
    )
    topology = Topology(num_ranks=RANKS, node_size=RANKS // nodes)
    return Blueprint(
        topology=topology, num_slots=SLOTS, hidden=HIDDEN, top_k=TOP_K, dtype=torch.float32, config=config, plan=plan
    )


def slots_of(rank: int, num_tokens: int = TOKENS) -> Tensor:
    dice = torch.Generator().manual_seed(rank)
    return torch.stack([torch.randperm(SLOTS, generator=dice)[:TOP_K] for _ in range(num_tokens)])


def arrive(transport, plan: Blueprint, slots_TK: Tensor):
    """Everything that one rank's experts are given, as (source, slots, weights), and what its exchange holds then."""
    exchange = Exchange(
        transport,
        num_slots=plan.num_slots,
        hidden=plan.hidden,
        top_k=plan.top_k,
        dtype=plan.dtype,
        device="cpu",
        config=plan.config,
        topology=plan.topology,
        plan=plan.plan,
    )
    x_TD = torch.ones(len(slots_TK), plan.hidden)
    weights_TK = torch.full(slots_TK.shape, 1 / TOP_K)
    got = exchange.dispatch(x_TD, slots_TK, weights_TK, tag=TAG, terms=TERMS).wait()
    return exchange, got


@pytest.mark.parametrize(("nodes", "dtype"), [(1, "run"), (1, "fp8"), (2, "run")])
def test_what_lands_is_what_the_others_would_have_sent(nodes, dtype):
    plan = blueprint(nodes=nodes, dtype=dtype)
    slots = [slots_of(rank) for rank in range(RANKS)]

    def whole(transport):
        _, got = arrive(transport, plan, slots[transport.rank])
        return got.slots_NK.clone(), got.weights_NK.clone(), got.source_N.clone()

    group = ThreadGroup(RANKS)
    group.start(whole)
    wanted = group.join()[2]
    script = land(plan, [slots], rank=2, terms=TERMS, device="cpu")
    exchange, got = arrive(StandIn(2, RANKS, row=plan.row, script=script), plan, slots[2])
    there = wanted[0] >= 0
    assert got.slots_NK.equal(wanted[0])
    assert got.weights_NK[there].equal(wanted[1][there])
    assert got.source_N[there.any(dim=1)].equal(wanted[2][there.any(dim=1)])
    assert got.x_ND.isfinite().all()
    assert got.x_ND[there.any(dim=1)].abs().sum() > 0
    exchange.check_faults()  # all blocks bear this rank's tag


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_round_goes_there_and_back_without_a_fault(nodes):
    plan = blueprint(nodes=nodes)
    slots = [slots_of(rank) for rank in range(RANKS)]
    script = land(plan, [slots, slots], rank=1, terms=TERMS, device="cpu")
    exchange, got = arrive(StandIn(1, RANKS, row=plan.row, script=script), plan, slots[1])
    out_TD = exchange.combine(got.x_ND.index_select(0, got.rows_M), got, tag=TAG._replace(kind=Kind.COMBINE)).wait()
    assert out_TD.shape == (TOKENS, HIDDEN)
    assert out_TD.isfinite().all()
    exchange.check_faults()
    sent = exchange.take_bytes()
    assert (sent.network > 0) == (nodes > 1)
    assert sent.node > 0


def test_layers_past_the_script_begin_again():
    plan = blueprint()
    first, second = [[slots_of(rank + 10 * layer) for rank in range(RANKS)] for layer in range(2)]
    script = land(plan, [first, second], rank=0, terms=TERMS, device="cpu")
    assert script.rows(TAG._replace(layer=3)) is script.rows(TAG._replace(layer=1))
    assert not script.rows(TAG).equal(script.rows(TAG._replace(layer=1)))
    later = land(plan, [first, second], rank=0, terms=TERMS, device="cpu", first=1)
    assert later.rows(TAG._replace(layer=1)).equal(script.rows(TAG))


def test_capacities_are_raised_until_everything_fits():
    even = [slots_of(rank) for rank in range(RANKS)]
    to_one = [torch.tensor([[0, 1, -1]] * TOKENS)] * RANKS
    tight = blueprint(plan=CapacityPlan.fixed(3))
    assert least_level(blueprint(), [even, to_one], bucket=TOKENS) == 0  # in one node a block holds the whole batch
    assert 0 < least_level(tight, [to_one], bucket=TOKENS) < MOST_LEVEL
    assert (
        least_level(blueprint(plan=CapacityPlan.fixed(1)), [[torch.tensor([[0, 1, 2]] * 64)] * RANKS], bucket=5) == 12
    )


def test_blocks_of_unequal_size_cannot_be_stood_in_for():
    plan = blueprint()
    script = land(plan, [[slots_of(rank) for rank in range(RANKS)]], rank=0, terms=TERMS, device="cpu")
    rows = torch.zeros(4, plan.row.num_bytes, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="not blocks of one size"):
        StandIn(0, RANKS, row=plan.row, script=script).all_to_all(
            rows, rows, recv_splits=(1, 2, 1, 0), send_splits=(1, 2, 1, 0), tag=TAG
        )


def test_its_own_rows_are_those_that_it_sends_now():
    plan = blueprint()
    slots = [slots_of(rank) for rank in range(RANKS)]
    script = land(plan, [slots], rank=2, terms=TERMS, device="cpu")
    own = torch.tensor([[5, 4, -1]] * TOKENS)  # both of rank 2's slots, whatever was recorded
    _, got = arrive(StandIn(2, RANKS, row=plan.row, script=script), plan, own)
    block = len(got.slots_NK) // RANKS
    mine = got.slots_NK[2 * block : 3 * block]
    assert mine[(mine >= 0).any(dim=1)].tolist() == [[1, 0, -1]] * TOKENS
