"""Capacities follow from shapes, buckets and levels; measured ones from routing, and the risk told is what dice say."""

from __future__ import annotations

import itertools

import pytest
import torch

from ep import CapacityPlan, Topology
from ep.capacity import count_hops, describe, hop_shapes, measured_plan, places_of, uniform_plan
from ep.reference import loop_pairs, loop_send_tokens
from ep.terms import MOST_LEVEL

ONE_NODE = Topology(num_ranks=4, node_size=4)
TWO_NODES = Topology(num_ranks=4, node_size=2)


def draw(ranks: int, tokens: int, num_slots: int, top_k: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.rand(tokens, num_slots, generator=generator).topk(top_k, dim=1).indices for _ in range(ranks)]


def test_a_plan_for_one_node_has_room_for_the_bucket_and_no_risk():
    shapes = hop_shapes(ONE_NODE, slots_per_rank=8, hierarchical=False)
    plan = uniform_plan(shapes, ONE_NODE, top_k=4, combine="ranks")
    [hop] = places_of(plan, shapes, top_k=4)
    assert not plan.may_overflow
    assert [(hop.dispatch(bucket, 0), hop.combine(bucket, 0)) for bucket in (1, 7, 128)] == [(1, 1), (7, 7), (128, 128)]
    assert hop.risk(128, 0) == 0.0


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_level_routing_fits_in_what_is_expected_of_it(hierarchical, combine):
    """In 200 exchanges of random routing nothing overflows, and blocks are well below the bucket."""
    topology = Topology(num_ranks=8, node_size=2)
    shapes = hop_shapes(topology, slots_per_rank=8, hierarchical=hierarchical)
    plan = uniform_plan(shapes, topology, top_k=4, combine=combine)
    assert plan.may_overflow
    hops = places_of(plan, shapes, top_k=4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        counts = count_hops(draw(8, 64, 64, 4, generator), topology, slots_per_rank=8, hierarchical=hierarchical)
        for hop, (rows, pairs) in zip(hops, counts, strict=True):
            assert max(rows) <= hop.dispatch(64, 0)
            assert combine == "ranks" or max(pairs) <= hop.combine(64, 0)
    assert hops[-1].dispatch(64, 0) < 64 * hops[-1].shape.sources


def test_each_level_adds_a_quarter_up_to_the_bucket():
    shapes = hop_shapes(TWO_NODES, slots_per_rank=2, hierarchical=True)
    outer, inner = places_of(CapacityPlan.fixed(8, num_hops=2, combine=10), shapes, top_k=2)
    assert [outer.dispatch(15, level) for level in range(5)] == [8, 10, 12, 14, 15]
    assert [outer.combine(15, level) for level in range(5)] == [10, 13, 15, 18, 20]
    assert [outer.combine(4, level) for level in (0, MOST_LEVEL)] == [8, 8]  # two pairs of each of 4 rows
    assert outer.dispatch(0, 0) == 1
    assert inner.dispatch(3, 0) == 6  # no more than 2 sources of 3 rows each can bring
    assert outer.dispatch(1000, MOST_LEVEL) == outer.dispatch(1000, MOST_LEVEL + 9) == 32


def test_hops_are_counted_as_loops_count_them():
    topology = Topology(num_ranks=6, node_size=2)
    slots = draw(6, 9, 12, 3, torch.Generator().manual_seed(3))
    slots[1][:] = -1
    over, inside = count_hops(slots, topology, slots_per_rank=2, hierarchical=True)
    [flat] = count_hops(slots, topology, slots_per_rank=2, hierarchical=False)
    to_ranks = [loop_send_tokens(part, slots_per_rank=2, num_ranks=6) for part in slots]
    to_nodes = [loop_send_tokens(part, slots_per_rank=4, num_ranks=3) for part in slots]
    pairs = [loop_pairs(part, slots_per_rank=2, num_ranks=6) for part in slots]
    assert flat[0] == [len(rows) for part in to_ranks for rows in part]
    assert flat[1] == [len(found) for part in pairs for found in part]
    assert over[0] == [len(rows) for part in to_nodes for rows in part]
    gateways = itertools.product(range(2), range(3), range(2))  # the gateway's place, its node, the rank's place
    assert inside[0] == [
        sum(len(to_ranks[2 * source_node + place][2 * node + local]) for source_node in range(3))
        for place, node, local in gateways
    ]


def test_a_measured_plan_overflows_as_often_as_it_says():
    """Routing with a favourite rank. Capacities at the median of 200 exchanges overflow in about half of 400 others."""
    generator = torch.Generator().manual_seed(7)

    def skewed() -> list[torch.Tensor]:
        scores = [torch.rand(32, 16, generator=generator) for _ in range(4)]
        for each in scores:
            each[:, :4] += 0.3
        return [each.topk(3, dim=1).indices for each in scores]

    sizes = {"slots_per_rank": 4, "hierarchical": False}
    plan = measured_plan([skewed() for _ in range(200)], TWO_NODES, **sizes, combine="slots", quantile=0.5)
    [hop] = places_of(plan, hop_shapes(TWO_NODES, **sizes), top_k=3)
    times = 0
    for _ in range(400):
        [(rows, pairs)] = count_hops(skewed(), TWO_NODES, **sizes)
        times += max(rows) > hop.dispatch(32, 0) or max(pairs) > hop.combine(32, 0)
    assert plan.hops[0].dispatch.risk(32, hop.dispatch(32, 0)) <= 0.51
    assert times / 400 <= hop.risk(32, 0) + 0.1
    assert times > 40
    quiet = measured_plan([skewed() for _ in range(200)], TWO_NODES, **sizes, combine="slots", quantile=1.0)
    assert quiet.hops[0].dispatch.places(32) > plan.hops[0].dispatch.places(32)


def test_a_plan_from_nothing_is_refused_in_words():
    with pytest.raises(ValueError, match="exchanges is empty: capacities are measured from at least one"):
        measured_plan([], ONE_NODE, slots_per_rank=1, hierarchical=False, combine="ranks")


def test_a_plan_tells_rows_bytes_and_how_often_a_step_does_not_fit():
    shapes = hop_shapes(TWO_NODES, slots_per_rank=2, hierarchical=True)
    hops = places_of(CapacityPlan.fixed(8, num_hops=2), shapes, top_k=2)
    mib = 2 * 9 * (1000 + 500) / 2**20
    assert describe(hops, bucket=16, level=0, exchanges=3, row_bytes=(1000, 500)) == [
        f"over nodes: 8 rows to each of 2 at 16 tokens, 8 back, {mib:.2f} MiB a rank and layer",
        f"inside a node: 8 rows to each of 2 at 16 tokens, 8 back, {mib:.2f} MiB a rank and layer",
        "steps that do not fit: nan of all, expected over 3 layers",
    ]
    shapes = hop_shapes(TWO_NODES, slots_per_rank=8, hierarchical=False)
    hops = places_of(uniform_plan(shapes, TWO_NODES, top_k=2, combine="ranks"), shapes, top_k=2)
    once = hops[0].risk(64, 0)
    told = describe(hops, bucket=64, level=0, exchanges=58, row_bytes=(1000, 500))[-1]
    assert told == f"steps that do not fit: {1 - (1 - once) ** 58:.2g} of all, expected over 58 layers"
    assert 0 < once < 1e-6
