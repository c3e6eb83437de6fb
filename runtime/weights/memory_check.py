"""The plan of bytes beside what was really allocated, once a rank is ready. On a CPU nobody counts. Pure but for the
counters of torch, which were never read on a GPU here.
"""

from __future__ import annotations

import torch

from .memory import MemoryPlan

_GIB = 1 << 30


def memory_lines(plan: MemoryPlan, device: torch.device) -> tuple[str, ...]:
    """A line for people, where the device counts."""
    if device.type != "cuda":
        return ()
    stats = torch.cuda.memory_stats(device)
    return (
        compare(plan, allocated=stats["allocated_bytes.all.current"], reserved=stats["reserved_bytes.all.current"]),
    )


def compare(plan: MemoryPlan, *, allocated: int, reserved: int) -> str:
    """Planned are weights, workspaces and cache; reserved is what torch took of the device, graphs' memory with it."""
    planned = plan.weights.total + plan.workspaces.total + plan.cache_bytes
    words = f"memory: {planned / _GIB:.2f} GiB planned, {allocated / _GIB:.2f} allocated, "
    words += f"{reserved / _GIB:.2f} taken of the device"
    over = reserved - plan.budget_bytes
    too_much = f", {over / _GIB:.2f} more than --gpu-memory-utilization allows"
    return words + (too_much if over > 0 else "")
