"""Settings of rebalancing that are refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.config import EplbConfig


@pytest.mark.parametrize(
    ("eplb", "message"),
    [
        ({"num_redundant_experts": 4}, "num_redundant_experts is 4; without --enable-eplb"),
        ({"enable_eplb": True, "num_redundant_experts": -1}, "num_redundant_experts is -1; it must be at least 0"),
        ({"eplb_window": 0}, "eplb_window is 0; it must be at least 1"),
        ({"eplb_interval": 0}, "eplb_interval is 0; it must be at least 1"),
        ({"eplb_min_gain": 1.0}, "eplb_min_gain is 1.0; it must be at least 0 and below 1"),
        ({"eplb_min_gain": float("nan")}, "eplb_min_gain is nan"),
        ({"eplb_policy": "random"}, "eplb_policy is 'random'; it must be serried or deepseek"),
        ({"eplb_bytes_per_step": 100}, "eplb_bytes_per_step is 100; it must be at least 4096"),
        ({"eplb_checkpoint_gbps": -1.0}, "eplb_checkpoint_gbps is -1.0"),
        ({"eplb_wire_gbps": 0.0}, "eplb_wire_gbps is 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(eplb: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EplbConfig(**eplb)
