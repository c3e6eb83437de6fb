"""Loading costs little more than what is kept: a rank of four with over a gigabyte of weights, in its own process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.checkpoints import SMALL, names_and_shapes

ROOT = Path(__file__).parents[2]
LARGE = SMALL | {
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
}


FP8_LAYERS = ("model.layers.1.", "model.layers.2.", "model.layers.3.")


def write_hollow_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Zeros that take no disk: a header, and a file that is one hole behind it. Some layers' experts are fp8."""
    (folder / "config.json").write_text(json.dumps(config))
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in names_and_shapes(config).items():
        quantized = ".experts." in name and name.startswith(FP8_LAYERS)
        tensors = [(name, shape, "F8_E4M3" if quantized else "BF16", 1 if quantized else 2)]
        if quantized:
            tensors.append((f"{name}_scale_inv", tuple(-(-size // 128) for size in shape), "F32", 4))
        for key, sizes, dtype, itemsize in tensors:
            start, end = end, end + math.prod(sizes) * itemsize
            entries[key] = {"dtype": dtype, "shape": sizes, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


@pytest.mark.slow
def test_peak_memory_of_a_loading_rank_stays_near_what_it_keeps(tmp_path: Path) -> None:
    write_hollow_checkpoint(tmp_path, LARGE)
    command = [sys.executable, "-m", "tests.runtime.measure_load", str(tmp_path), "1", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert found["held"] >= 1_000_000_000
    assert found["peak"] <= 1.3 * found["held"] + 300_000_000, found
