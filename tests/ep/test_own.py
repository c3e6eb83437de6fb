"""A rank alone: its rows stay where they are, and nobody is asked."""

from __future__ import annotations

import pytest
import torch

from ep import ExchangeConfig, run_ranks
from ep.conformance import check_exchange

LIMIT_S = 30


class Mute:
    """A transport of one rank that must not be used."""

    rank, size = 0, 1

    def all_to_all(self, *_: object, **__: object) -> None:
        raise AssertionError("a rank alone sends something")

    all_gather = all_to_all


@pytest.mark.parametrize("dispatch_dtype", ["run", "fp8"])
@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_a_rank_alone_asks_no_transport_and_gets_the_dense_sum(combine: str, dispatch_dtype: str):
    config = ExchangeConfig(
        exchange="exact", hierarchical="off", combine=combine, dispatch_dtype=dispatch_dtype, round_tokens=40
    )  # type: ignore[arg-type]
    check_exchange(Mute(), config=config, dtype=torch.bfloat16)  # type: ignore[arg-type]


def test_nodes_of_one_rank_hand_rows_on_unchanged():
    config = ExchangeConfig(exchange="exact", hierarchical="on", round_tokens=4)
    run_ranks(
        3,
        lambda transport: check_exchange(transport, config=config, dtype=torch.float64, node_size=1),
        timeout_s=LIMIT_S,
    )
