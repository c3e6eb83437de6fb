"""The experts' kernels at the sizes in which they are used, for whoever compiles them without a GPU.

DeepSeek-V3 and Kimi-K2 in fp8 as they are stored, DeepSeek-V2-Lite in bfloat16; every tiling.
"""

from dataclasses import dataclass
from typing import Any

import triton

from ep.kernel_shapes import quantize_shape

from .expert_kernels import TILINGS, Tiling, down_kernel, gate_up_kernel
from .pair_kernels import count_kernel, place_kernel
from .pairs import CHUNK
from .router_kernels import PARTS, choose_kernel, logits_kernel

PROGRAMS = 132
"""Multiprocessors of an H100 or H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The sizes of one model's layer on one rank."""

    title: str
    hidden: int
    expert_hidden: int
    num_experts: int
    top_k: int
    slots: int
    is_fp8: bool
    router: dict[str, Any]


V3_ROUTER = {"SIGMOID": True, "HAS_BIAS": True, "Q": 8, "KEPT": 4, "NORMALIZE": True, "COPIES": 4}
K2_ROUTER = {"SIGMOID": True, "HAS_BIAS": True, "Q": 1, "KEPT": 0, "NORMALIZE": True, "COPIES": 1}
LITE_ROUTER = {"SIGMOID": False, "HAS_BIAS": False, "Q": 1, "KEPT": 0, "NORMALIZE": False, "COPIES": 1}
V3 = Model(
    title="V3, 32 ranks", hidden=7168, expert_hidden=2048, num_experts=256, top_k=8, slots=9, is_fp8=True,
    router=V3_ROUTER,
)  # fmt: skip
K2 = Model(
    title="K2, 8 ranks", hidden=7168, expert_hidden=2048, num_experts=384, top_k=8, slots=48, is_fp8=True,
    router=K2_ROUTER,
)  # fmt: skip
LITE = Model(
    title="V2-Lite, 1 rank", hidden=2048, expert_hidden=1408, num_experts=64, top_k=6, slots=64, is_fp8=False,
    router=LITE_ROUTER,
)  # fmt: skip


def kernel_shapes() -> list[dict[str, Any]]:
    """One entry a kernel and shape: title, kernel, signature, constants, options, and what must be in its code."""
    entries = [quantize_shape("V3, rows that arrived", hidden=V3.hidden, top_k=V3.top_k)]
    for model in (V3, K2, LITE):
        entries += [*_router(model), *_pairs(model)]
    for model in (V3, LITE):
        for tiling in TILINGS.values():
            entries += [_gate_up(model, tiling), _down(model, tiling)]
    return entries


def _router(model: Model) -> list[dict[str, Any]]:
    logits = _entry(
        f"router logits, {model.title}",
        logits_kernel,
        {"x_ptr": "*bf16", "gate_ptr": "*fp32", "parts_ptr": "*fp32", "num_tokens": "i32", "x_stride": "i32:16"},
        {
            "D": model.hidden, "E": model.num_experts, "PARTS": PARTS, "BLOCK_T": 16, "BLOCK_E": 64, "BLOCK_D": 64,
        },
        must={"wgmma", "cp.async"}, num_stages=4,
    )  # fmt: skip
    bias = {"bias_ptr": "*fp32"} if model.router["HAS_BIAS"] else {}
    pointers = dict.fromkeys(("positions_ptr", "table_ptr", "bounds_ptr", "experts_ptr", "slots_ptr"), "*i64")
    groups = model.router["Q"]
    choose = _entry(
        f"router choice, {model.title}",
        choose_kernel,
        {
            "parts_ptr": "*fp32", **bias, **pointers, "weights_ptr": "*fp32", "counts_ptr": "*i64",
            "num_tokens": "i32", "rank": "i32", "scaling": "fp32",
        },
        {
            **model.router, **({} if bias else {"bias_ptr": None}), "E": model.num_experts, "K": model.top_k,
            "PARTS": PARTS, "BLOCK_T": 1, "BLOCK_Q": groups,
            "BLOCK_G": triton.next_power_of_2(model.num_experts // groups), "BLOCK_K": 8,
            "BLOCK_X": model.router["COPIES"],
        },
    )  # fmt: skip
    return [logits, choose]


def _pairs(model: Model) -> list[dict[str, Any]]:
    sizes = {"TOP_K": model.top_k, "CHUNK": CHUNK, "BLOCK_L": triton.next_power_of_2(model.slots)}
    numbers = {"row_stride": "i32", "num_pairs": "i32", "num_slots": "i32"}
    slots = {"slots_ptr": "*i64", "chunk_counts_ptr": "*i32"}
    places = {"starts_ptr": "*i32", "rows_ptr": "*i32", "places_ptr": "*i32"}
    return [
        _entry(f"count pairs, {model.title}", count_kernel, slots | numbers, sizes),
        _entry(
            f"place pairs, {model.title}",
            place_kernel,
            slots | places | numbers | {"num_chunks": "i32"},
            sizes | {"BLOCK_C": 64},
        ),
    ]


def _gate_up(model: Model, tiling: Tiling) -> dict[str, Any]:
    signature = {"rows_ptr": "*i32", "starts_ptr": "*i32", "x_stride": "i32:16", "x_scale_stride": "i32"}
    return _matmul(
        f"gate and up, {model.title}, {tiling.rows} rows",
        gate_up_kernel,
        model,
        tiling,
        signature | {"num_slots": "i32"},
        values=("x_ptr", "w_ptr", "act_ptr"),
        scales=("x_scale_ptr", "w_scale_ptr", "act_scale_ptr"),
        constants={"POWER_OF_TWO": False},
    )


def _down(model: Model, tiling: Tiling) -> dict[str, Any]:
    return _matmul(
        f"down, {model.title}, {tiling.rows} rows",
        down_kernel,
        model,
        tiling,
        {"starts_ptr": "*i32", "y_ptr": "*bf16", "num_slots": "i32"},
        values=("act_ptr", "w_ptr"),
        scales=("act_scale_ptr", "w_scale_ptr"),
        constants={},
    )


def _matmul(
    title: str,
    kernel: Any,
    model: Model,
    tiling: Tiling,
    signature: dict[str, str],
    *,
    values: tuple[str, ...],
    scales: tuple[str, ...],
    constants: dict[str, Any],
) -> dict[str, Any]:
    kind = "*fp8e4nv" if model.is_fp8 else "*bf16"
    signature = signature | dict.fromkeys(values, kind) | (dict.fromkeys(scales, "*fp32") if model.is_fp8 else {})
    constants = constants | ({} if model.is_fp8 else dict.fromkeys(scales))
    constants |= {
        "D": model.hidden,
        "F": model.expert_hidden,
        "FP8": model.is_fp8,
        "BLOCK": 128,
        "BLOCK_K": 128 if model.is_fp8 else 64,
        "ROWS": tiling.rows,
        "BLOCK_L": triton.next_power_of_2(model.slots),
        "PROGRAMS": PROGRAMS,
        "EXACT": False,
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return _entry(title, kernel, signature, constants, must={"wgmma", "cp.async"}, **options)


def _entry(
    title: str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    must: set[str] | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
) -> dict[str, Any]:
    return {
        "title": title,
        "kernel": kernel,
        "signature": signature,
        "constants": constants,
        "options": {"num_warps": num_warps, "num_stages": num_stages},
        "must": must or set(),
    }
