"""Loads one rank's weights in a process of its own and prints what it held and the most memory it ever had, as JSON.

python -m tests.runtime.measure_load FOLDER RANK RANKS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from moe import spread
from runtime.model.model_config import read_model_config
from runtime.weights.checkpoint import open_checkpoint
from runtime.weights.weights import DecoderWeights, load_banks, load_shared, verify_held
from tests.runtime.checkpoints import held_bytes


def main(folder: Path, rank: int, num_ranks: int) -> None:
    model = read_model_config(folder)
    assert model.moe is not None
    placement = spread(model.moe.num_experts, num_ranks)
    source = open_checkpoint(folder, model)
    verify_held(source, model, placement, ranks=[rank])
    shared = load_shared(source, model, dtype=torch.bfloat16)
    banks = load_banks(source, model, placement, rank=rank, dtype=torch.bfloat16)
    held = held_bytes(DecoderWeights.join(shared, banks))
    sys.stdout.write(json.dumps({"held": held, "read": source.bytes_read, "peak": peak_resident_bytes()}))


def peak_resident_bytes() -> int:
    """The kernel's high-water mark of this address space; getrusage's would include the parent's before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
