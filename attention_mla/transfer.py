"""The host's numbers on their way to a device, without the host waiting for it.

A copy to a GPU out of ordinary memory makes the host wait for all that the device was given before; out of pinned
memory it takes its turn like a kernel. Torch keeps pinned memory for later copies, and hands none out again before the
copy from it is done.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device | str) -> Tensor:
    """A tensor of these numbers there; on a CPU the same memory, without a copy."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
