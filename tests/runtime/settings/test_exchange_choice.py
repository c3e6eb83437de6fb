"""What is settled when a user leaves the exchange open, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep import ExchangeConfig, choose
from ep.config import BACK_ENDS
from runtime.costs.roofline import CostShape
from runtime.model.model_config import read_model_config
from runtime.settings.exchange_choice import ExchangeChoice, choose_exchange, to_try
from runtime.weights.hardware import Hardware, read_hardware

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
V3 = CostShape.of(read_model_config(PROFILES / "models" / "deepseek-v3.json"))
H200 = read_hardware(PROFILES / "hardware" / "h200.toml")


def choice(
    *,
    mode: str = "auto",
    hierarchical: str = "auto",
    ranks: int = 32,
    node_size: int = 8,
    on_gpu: bool = True,
    hardware: Hardware | None = H200,
) -> ExchangeChoice:
    return choose_exchange(
        V3, mode=mode, hierarchical=hierarchical, ranks=ranks, node_size=node_size, tokens=128, on_gpu=on_gpu,
        hardware=hardware,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("hierarchical", ["on", "off"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_is_asked_for_stays(mode, hierarchical, on_gpu):
    found = choice(mode=mode, hierarchical=hierarchical, on_gpu=on_gpu)
    assert (found.mode, found.hierarchical) == (mode, hierarchical == "on")


def test_a_gpu_gets_capacities_and_a_cpu_counts():
    assert choice(on_gpu=True).mode == "bounded"
    assert choice(on_gpu=False).mode == "exact"


@pytest.mark.parametrize("mode", BACK_ENDS)
def test_a_back_end_that_is_asked_for_goes_straight_over_any_nodes(mode):
    found = choice(mode=mode)
    assert (found.mode, found.hierarchical) == (mode, False)
    assert found.why == f"{mode} as asked; straight, as it has no other way"


def test_a_gpu_tries_what_is_installed_beside_what_was_settled():
    asked = ExchangeConfig(round_tokens=128, dispatch_dtype="fp8")
    settled = choose(asked, exchange="bounded", hierarchical="on")
    tries = to_try(asked, settled, installed=BACK_ENDS)
    assert tries[0] is settled
    assert [(each.exchange, each.hierarchical) for each in tries[1:]] == [(mode, "off") for mode in BACK_ENDS]
    assert all((each.round_tokens, each.dispatch_dtype) == (128, "fp8") for each in tries)


@pytest.mark.parametrize(
    "asked", [{"exchange": "bounded"}, {"exchange": "nccl_ep"}, {"combine": "slots"}, {"hierarchical": "on"}]
)
def test_nothing_is_tried_where_a_user_has_chosen_or_nothing_is_installed(asked):
    config = ExchangeConfig(**asked)
    settled = choose(config, exchange="bounded", hierarchical="off")
    assert to_try(config, settled, installed=BACK_ENDS) == ()
    assert to_try(ExchangeConfig(), settled, installed=()) == ()


@pytest.mark.parametrize(
    ("ranks", "by_node"), [(1, False), (8, False), (12, False), (16, True), (32, True), (64, True)]
)
def test_rows_go_by_node_where_several_whole_nodes_share_a_narrow_network(ranks, by_node):
    assert choice(ranks=ranks).hierarchical is by_node
    assert choice(ranks=ranks, hardware=None).hierarchical is by_node


def test_rows_go_straight_where_the_network_is_as_wide_as_the_link():
    wide = Hardware(
        name="wide", memory_bytes=1, bf16_flops=1, fp8_flops=1, memory_bytes_per_s=1e12, link_bytes_per_s=4e11,
        network_bytes_per_s=4e11,
    )  # fmt: skip
    found = choice(hardware=wide)
    assert not found.hierarchical
    assert "us straight at 128 tokens a rank" in found.why


def test_uneven_nodes_are_refused_with_a_size_that_would_do():
    with pytest.raises(ValueError, match=r"12 ranks do not fill nodes of 8; node_size must divide ranks, e\.g\. 6"):
        choice(ranks=12, hierarchical="on")
