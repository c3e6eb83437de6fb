"""The device that a rank runs on, and how much of its memory is the rank's own."""

from __future__ import annotations

import os

import torch

from ..scheduling.overlap import refuse_all_sms
from .config import EngineConfig


def find_device(name: str) -> torch.device:
    """cpu or cuda. ValueError for another, and for one that is not here."""
    if name not in ("cpu", "cuda"):
        raise ValueError(
            f"device is {name!r}; it must be cpu or cuda, e.g. cpu; a rank takes the GPU of its local rank"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch sees no CUDA device; install a CUDA build of torch and a driver, or use cpu"
        )
    return torch.device(name)


def own_bytes(device: torch.device, ranks: int, *, ranks_here: int | None) -> int:
    """What one of a group's ranks may count as its own; ranks_here: see `settling.settle`."""
    num_devices = torch.cuda.device_count() if device.type == "cuda" else 1
    return _device_bytes(device) // ranks_a_device(ranks, ranks_here, num_devices=num_devices)


def ranks_a_device(ranks: int, ranks_here: int | None, *, num_devices: int) -> int:
    """How many share the memory of one device of this node."""
    return ranks if ranks_here is None else -(-ranks_here // max(num_devices, 1))


def check_sms(config: EngineConfig, device: torch.device) -> None:
    """ValueError where exchanges would be left all of a GPU's multiprocessors."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        refuse_all_sms(config.left_sms, device=found.name, multiprocessors=found.multi_processor_count)


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
