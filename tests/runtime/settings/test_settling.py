"""What a configuration leaves open about nodes and the exchange, decided; and what cannot be, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep import ExchangeConfig, Topology
from runtime.settings.config import EngineConfig
from runtime.settings.devices import ranks_a_device
from runtime.settings.memory_numbers import memory_numbers
from runtime.settings.settling import Settled, settle

TINY = "profiles/models/tiny-v3"


def settled(*, local_size: int | None = None, ranks: int = 4, node_size: int | None = None, **exchange: str) -> Settled:
    config = EngineConfig(model=TINY, ranks=ranks, node_size=node_size, exchange=ExchangeConfig(**exchange))  # type: ignore[arg-type]
    return settle(config, local_size=local_size)


def test_nothing_about_the_exchange_is_left_open():
    found = settled()
    assert found.config.exchange.is_settled
    assert (found.config.exchange.exchange, found.config.exchange.hierarchical) == ("exact", "off")
    assert found.topology == Topology(num_ranks=4, node_size=4)
    [note] = found.notes
    assert note.startswith("exchange: exact, for on a CPU the host is there to count")
    assert note.endswith("straight, for all ranks are on one node")


@pytest.mark.parametrize(
    ("ranks", "here", "devices", "share"),
    [
        (4, None, 8, 4),  # threads of one process are all on one
        (32, 8, 8, 1),
        (32, 8, 4, 2),
        (6, 3, 2, 2),
        (32, 8, 1, 8),  # a CPU's memory is all of its node's ranks'
    ],
)
def test_ranks_share_the_memory_of_one_device_with_those_that_are_on_it(ranks, here, devices, share):
    assert ranks_a_device(ranks, here, num_devices=devices) == share


def test_a_rank_plans_with_its_share_of_its_own_node():
    config = EngineConfig(model=TINY, ranks=4)
    together, apart = (settle(config, local_size=2, ranks_here=here).plan.numbers.device_bytes for here in (None, 2))
    assert apart == pytest.approx(2 * together, abs=4)


def test_one_rank_has_no_exchange_to_speak_of():
    assert settled(ranks=1).notes == ()


def test_nodes_are_the_launchers_unless_the_user_says_otherwise():
    assert settled(local_size=2).topology.node_size == 2
    assert settled(local_size=2).config.exchange.hierarchical == "on"
    assert settled(local_size=2, node_size=4).topology.node_size == 4
    assert settled(local_size=2, hierarchical="off").config.exchange.hierarchical == "off"
    assert settled(node_size=64).topology.node_size == 4


def test_ranks_that_do_not_fill_nodes_go_straight_and_count_as_apart():
    found = settled(ranks=3, node_size=2)
    assert (found.topology.node_size, found.config.exchange.hierarchical) == (1, "off")
    with pytest.raises(ValueError, match=r"3 ranks do not fill nodes of 2; node_size must divide ranks, e\.g\. 1"):
        settled(ranks=3, node_size=2, hierarchical="on")


def test_ranks_that_would_build_it_differently_have_different_digests():
    digests = {
        found.config.digest(found.model)
        for found in (
            settled(),
            settled(exchange="bounded"),
            settled(hierarchical="on", node_size=2),
            settled(node_size=2),
        )
    }
    assert len(digests) == 3  # asked for or chosen, two nodes of two are the same
    once = settled()
    assert settle(once.config).config == once.config


def test_rows_narrower_than_a_float64_run_are_refused():
    config = EngineConfig(model=TINY, ranks=2, dtype="float64", exchange=ExchangeConfig(dispatch_dtype="fp8"))
    with pytest.raises(ValueError, match="dispatch_dtype = 'fp8': in a float64 run nothing is narrower"):
        settle(config)


def test_the_plan_counts_the_buffers_of_the_exchange_that_is_built():
    def planned(**exchange: str) -> int:
        found = settled(node_size=2, **exchange)
        numbers = memory_numbers(found.config, found.model, device_bytes=1 << 40, on_gpu=False)
        assert numbers.exchange_buffer_bytes == found.plan.workspaces.exchange
        return numbers.exchange_buffer_bytes

    straight, by_node, bounded = planned(hierarchical="off"), planned(hierarchical="on"), planned(exchange="bounded")
    assert len({straight, by_node, bounded}) == 3


def test_a_node_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match=r"node_size is 0; it must be a whole number of at least 1, e\.g\. 8"):
        replace(EngineConfig(model=TINY), node_size=0)
