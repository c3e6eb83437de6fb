"""What may carry an exchange's rows between GPUs instead of the transport, by the name of its mode.

Knows which there are, what they lack and what they refuse; opens one. Each is a module of its own, which imports what
it needs when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import nccl_ep, symmetric
from .blueprint import Blueprint
from .config import BACK_ENDS, ExchangeMode
from .lanes import Lanes
from .parts import BackEnd
from .transport import Transport


@dataclass(frozen=True, slots=True)
class Maker:
    """One kind of back end.

    lacks           why it cannot be used on this machine
    refuses         why it would not serve an exchange of this build
    library_bytes   device memory that it takes beside the exchange's buffers
    """

    open: Callable[..., BackEnd]
    lacks: Callable[[], str | None]
    refuses: Callable[[Blueprint], str | None]
    library_bytes: Callable[[Blueprint], int]


MAKERS: dict[str, Maker] = {
    "nccl_ep": Maker(nccl_ep.NcclEp, nccl_ep.lacks, nccl_ep.refuses, nccl_ep.library_bytes),
    "symmetric": Maker(symmetric.Symmetric, symmetric.lacks, symmetric.refuses, symmetric.library_bytes),
}
KEEPS_MEMORY = ("symmetric",)
"""What was once allocated there stays until the process ends."""
assert tuple(MAKERS) == BACK_ENDS, "a mode that something else carries has its maker"


def refusal(mode: str, device: torch.device | str) -> str | None:
    """Why a mode cannot be had on this device, with what would do; None where it can, and for the transport's modes."""
    if mode not in MAKERS:
        return None
    if torch.device(device).type != "cuda":
        return f"exchange is {mode!r}, which carries rows between GPUs, but device is {device}; e.g. exact"
    lacks = MAKERS[mode].lacks()
    return None if lacks is None else f"exchange is {mode!r}, but {lacks}; or take bounded"


def installed() -> tuple[ExchangeMode, ...]:
    """Those that lack nothing on this machine."""
    return tuple(mode for mode in BACK_ENDS if MAKERS[mode].lacks() is None)


def opener(
    transport: Transport, *, lanes: Lanes, device: torch.device, comm_sms: int = 0
) -> Callable[[Blueprint], BackEnd | None]:
    """For `Exchange`: opens what a blueprint's mode needs beside the transport, on all ranks together; None for modes
    that need nothing. ValueError where it is not installed or refuses the build.

    comm_sms: multiprocessors that it may take; 0: as it likes.
    """

    def open_back_end(blueprint: Blueprint) -> BackEnd | None:
        mode = blueprint.config.exchange
        if mode not in MAKERS:
            return None
        broken = MAKERS[mode].refuses(blueprint)
        if broken is not None:
            raise ValueError(broken)
        return MAKERS[mode].open(transport, blueprint, lanes=lanes, device=device, comm_sms=comm_sms)

    return open_back_end
