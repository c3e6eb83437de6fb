"""What a user may set about expert load and placement. Frozen; refused in words where it makes no sense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .moves import CELL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """Whether and when experts move between ranks, and where they sit at the start."""

    enable_eplb: bool = False
    """Move experts between ranks while decoding, so that all ranks' experts are loaded alike."""

    num_redundant_experts: int = 0
    """Slots beyond one for each expert, in each layer, over all ranks: they hold copies of the busiest."""

    eplb_window: int = 1000
    """Steps whose loads a decision looks at."""

    eplb_interval: int = 3000
    """Steps from one look at the loads to the next; the first is after a window."""

    eplb_min_gain: float = 0.05
    """Share of the slowest ranks' expert rows that must go away by it, or nothing moves.
    A layer whose own gain is below half of it stays as it is even then."""

    eplb_policy: Literal["serried", "deepseek"] = "serried"
    """Who plans: serried, few moves and never two copies on one rank; deepseek, as DeepSeek published it."""

    eplb_bytes_per_step: int = 16 << 20
    """Bytes of experts that a rank sends, and gets, in one step at most."""

    eplb_checkpoint_gbps: float = 0.0
    """Gigabytes a second at which a rank reads experts from its checkpoint; where that is faster than from another
    rank, a copy comes from there, if it fits into --eplb-bytes-per-step whole. 0: it is not asked."""

    eplb_wire_gbps: float = 50.0
    """Gigabytes a second that a rank gets from others: what --eplb-checkpoint-gbps is compared with."""

    init_placement: str | None = None
    """File of --record-routing: experts sit at the start as suits the loads in it."""

    record_routing: str | None = None
    """File to write: how many tokens each expert got in each step; each rank adds its number to the name, as in
    routing.0. Look at them with serried eplb."""

    record_routing_tokens: int = 0
    """Tokens of each rank, the first so many, whose experts --record-routing writes one by one, too."""

    def __post_init__(self) -> None:
        for name, least, legal in (
            ("num_redundant_experts", 0, 32),
            ("eplb_window", 1, 1000),
            ("eplb_interval", 1, 3000),
            ("eplb_bytes_per_step", 16 * CELL_BYTES, 16 << 20),
            ("record_routing_tokens", 0, 4096),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}, e.g. {legal}")
        if self.num_redundant_experts and not self.enable_eplb and self.init_placement is None:
            raise ValueError(
                f"num_redundant_experts is {self.num_redundant_experts}; without --enable-eplb or --init-placement "
                "nobody chooses what the copies are of, e.g. 0"
            )
        if self.eplb_policy not in ("serried", "deepseek"):
            raise ValueError(f"eplb_policy is {self.eplb_policy!r}; it must be serried or deepseek, e.g. serried")
        if not 0.0 <= self.eplb_min_gain < 1.0:
            raise ValueError(f"eplb_min_gain is {self.eplb_min_gain}; it must be at least 0 and below 1, e.g. 0.05")
        self._check_speeds()
        self._check_files()

    def _check_speeds(self) -> None:
        if not (math.isfinite(self.eplb_checkpoint_gbps) and self.eplb_checkpoint_gbps >= 0):
            raise ValueError(
                f"eplb_checkpoint_gbps is {self.eplb_checkpoint_gbps}; it must be a finite number from 0 on, e.g. 2"
            )
        if not (math.isfinite(self.eplb_wire_gbps) and self.eplb_wire_gbps > 0):
            raise ValueError(f"eplb_wire_gbps is {self.eplb_wire_gbps}; it must be a finite number above 0, e.g. 50")

    def _check_files(self) -> None:
        for name in ("init_placement", "record_routing"):
            value = getattr(self, name)
            if value is not None and Path(value).name in ("", ".."):
                raise ValueError(f"{name} is {value!r}; it must name a file, e.g. routing")
        if self.record_routing_tokens and self.record_routing is None:
            raise ValueError(
                f"record_routing_tokens is {self.record_routing_tokens}, but nothing is recorded; give "
                "--record-routing, e.g. routing, or leave it out"
            )
