"""How expert ranks are reached, as a user may set it. Knows names and rules, not what anything costs."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

ExchangeMode = Literal["auto", "exact", "bounded", "nccl_ep", "symmetric"]
BACK_ENDS: tuple[ExchangeMode, ...] = ("nccl_ep", "symmetric")
"""Modes in which something other than the transport carries the rows; see `back_ends`."""
Switch = Literal["auto", "on", "off"]
CombineMode = Literal["ranks", "slots"]
DispatchDtype = Literal["run", "fp8"]
CombineDtype = Literal["run", "float32"]

MOST_ROUND_TOKENS = 1 << 20
"""Tokens of one round at most: more than any batch has, and buffers whose bytes can still be counted in 64 bits."""

WORDS: dict[str, tuple[str, ...]] = {
    "exchange": get_args(ExchangeMode),
    "hierarchical": get_args(Switch),
    "combine": get_args(CombineMode),
    "dispatch_dtype": get_args(DispatchDtype),
    "combine_dtype": get_args(CombineDtype),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeConfig:
    """How expert ranks are reached."""

    exchange: ExchangeMode = "auto"
    """exact tells how many rows come before it sends them, and needs the host for it; bounded sends blocks of a fixed
    size, and runs a step again when rows did not fit; nccl_ep (NVIDIA's expert-parallel library) and symmetric (torch's
    symmetric memory) carry rows between GPUs without padding. auto chooses by what they cost."""

    hierarchical: Switch = "auto"
    """Whether a token travels once to each node, and inside the node from there; auto chooses by what it costs."""

    combine: CombineMode = "ranks"
    """What returns: `ranks` one row per token and rank, fewest bytes; `slots` one row per token and slot, so that the
    result does not depend on where experts sit."""

    dispatch_dtype: DispatchDtype = "run"
    """Number format of rows on their way to the experts: that of the run, or fp8 with a scale for each 128 columns."""

    combine_dtype: CombineDtype = "run"
    """Number format of rows on their way back: that of the run, or float32."""

    round_tokens: int = 1024
    """Most tokens a rank sends at once; larger batches go in rounds. Sets the size of the exchange buffers."""

    def __post_init__(self) -> None:
        for field, words in WORDS.items():
            value = getattr(self, field)
            if value not in words:
                legal = words[1] if words[0] == "auto" else words[0]
                raise ValueError(f"{field} = {value!r}: must be one of {', '.join(words)}, for example {legal}")
        if self.round_tokens < 1:
            raise ValueError(f"round_tokens = {self.round_tokens}: must be at least 1, for example 1024")
        if self.round_tokens > MOST_ROUND_TOKENS:
            raise ValueError(
                f"round_tokens = {reprlib.repr(self.round_tokens)}: must be at most {MOST_ROUND_TOKENS}, "
                "for example 1024"
            )

        if self.exchange in BACK_ENDS:
            self._refuse_more_than_straight()

    def _refuse_more_than_straight(self) -> None:
        """ValueError for what the back ends cannot: they go to every rank by themselves, and one row comes back."""
        asked = {"combine": (self.combine, "ranks"), "hierarchical": (self.hierarchical, "off")}
        for field, (value, legal) in asked.items():
            if value not in (legal, "auto"):
                raise ValueError(f"{field} = {value!r}: with exchange {self.exchange} it must be {legal}")

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be chosen, as an Exchange needs it."""
        return "auto" not in (self.exchange, self.hierarchical)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The number format of rows on their way back in a run of `dtype`."""
        return torch.float32 if self.combine_dtype == "float32" else dtype

    def refuse_narrow(self, dtype: torch.dtype) -> None:
        """ValueError for rows that would be narrower than a float64 run, in which nothing is."""
        narrow = {"dispatch_dtype": self.dispatch_dtype, "combine_dtype": self.combine_dtype}
        for field, value in narrow.items():
            if dtype is torch.float64 and value != "run":
                raise ValueError(f"{field} = {value!r}: in a float64 run nothing is narrower; it must be run")


def choose(config: ExchangeConfig, *, exchange: ExchangeMode, hierarchical: Switch) -> ExchangeConfig:
    """The config with what it leaves open decided by the caller; what the user set stays."""
    return replace(
        config,
        exchange=exchange if config.exchange == "auto" else config.exchange,
        hierarchical=hierarchical if config.hierarchical == "auto" else config.hierarchical,
    )
