"""What was planned stands beside what was taken, and too much is said."""

from __future__ import annotations

import torch

from runtime.model.model_config import read_model_config
from runtime.weights.memory import MemoryNumbers, plan_memory
from runtime.weights.memory_check import compare, memory_lines

GIB = 1 << 30


def plan():
    numbers = MemoryNumbers(
        ranks=1, dtype_bytes=2, device_bytes=4 * GIB, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64,
        num_pages=64, gpu_memory_utilization=0.5,
    )  # fmt: skip
    return plan_memory(read_model_config("profiles/models/tiny-v3"), numbers)


def test_a_line_says_planned_allocated_and_taken():
    assert compare(plan(), allocated=GIB, reserved=GIB + GIB // 2).endswith("1.00 allocated, 1.50 taken of the device")


def test_more_than_was_allowed_is_said():
    assert compare(plan(), allocated=GIB, reserved=3 * GIB).endswith("1.00 more than --gpu-memory-utilization allows")


def test_a_cpu_says_nothing():
    assert memory_lines(plan(), torch.device("cpu")) == ()
