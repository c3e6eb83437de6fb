"""The exchange's kernels at the sizes in which they are used, for whoever compiles them without a GPU.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437) on 32 ranks with 128 tokens each, and DeepSeek-V2-Lite.
"""

from typing import Any

import triton.language as tl

from .kernels import add_kernel, pack_kernel, places_kernel
from .quant_kernels import BLOCKS_AT_ONCE, quantize_kernel

V3_HIDDEN, V3_TOP_K = 7168, 8
LITE_HIDDEN, LITE_TOP_K = 2048, 6


def kernel_shapes() -> list[dict[str, Any]]:
    """One entry a kernel and shape: title, kernel, signature, constants, options, and what must be in its code."""
    return [
        _places(ranks=32),
        _pack("V3, bf16", words=V3_HIDDEN * 2 // 8, top_k=V3_TOP_K),
        _pack("V3, fp8", words=(V3_HIDDEN + V3_HIDDEN // 32) // 8, top_k=V3_TOP_K),
        _pack("V2-Lite, bf16", words=LITE_HIDDEN * 2 // 8, top_k=LITE_TOP_K),
        _add("V3, weighed into blocks", hidden=V3_HIDDEN, rows=V3_TOP_K, is_weighed=True, index="*i32"),
        _add("V3, what came back", hidden=V3_HIDDEN, rows=V3_TOP_K, is_weighed=False, index="*i64"),
        _add("V2-Lite, what came back", hidden=LITE_HIDDEN, rows=LITE_TOP_K, is_weighed=False, index="*i64"),
        quantize_shape("V3, tokens", hidden=V3_HIDDEN, top_k=0),
    ]


def quantize_shape(title: str, *, hidden: int, top_k: int) -> dict[str, Any]:
    """`quantize_kernel`; with a top_k it looks up which rows have a place."""
    constants = {
        "D": hidden,
        "TOP_K": top_k,
        "BLOCK_K": max(top_k, 1),
        "BLOCK": 128,
        "BLOCKS": BLOCKS_AT_ONCE,
        "POWER_OF_TWO": False,
        "EXACT": False,
    }
    signature = {
        "x_ptr": "*bf16",
        "places_ptr": "*i32",
        "q_ptr": "*fp8e4nv",
        "scale_ptr": "*fp32",
        "x_stride": "i32:16",
        "q_stride": "i32:16",
        "scale_stride": "i32",
    }
    if not top_k:
        constants["places_ptr"] = None
        del signature["places_ptr"]
    return _entry(f"quantise rows, {title}", quantize_kernel, signature, constants)


def _places(*, ranks: int) -> dict[str, Any]:
    pointers = {"slots": "i64", "rows": "i64", "fits": "i1", "counts": "i64", "overflow": "i1", "back": "i64"}
    numbers = ("num_rows", "slots_stride", "slots_per_member", "num_members", "capacity")
    constants = {"K": V3_TOP_K, "J": min(V3_TOP_K, ranks), "BLOCK_T": 128, "BLOCK_K": V3_TOP_K, "BLOCK_J": V3_TOP_K}
    return _entry(f"places, V3, {ranks} ranks", places_kernel, _signature(pointers, numbers), constants)


def _pack(title: str, *, words: int, top_k: int) -> dict[str, Any]:
    fields = {"origin": "i64", "slots": "i64", "weights": "fp32", "values": "i64"}
    pointers = {"order": "i64", **fields, **{f"to_{name}": kind for name, kind in fields.items()}}
    names = [*fields, *(f"to_{name}" for name in fields)]
    numbers = ("num_places", "num_rows", *(f"{name}_stride" for name in names))
    constants = {"K": top_k, "X": words, "BLOCK_N": 1, "BLOCK_K": 8, "BLOCK_X": 1024}
    return _entry(f"pack, {title}", pack_kernel, _signature(pointers, numbers), constants)


def _add(title: str, *, hidden: int, rows: int, is_weighed: bool, index: str) -> dict[str, Any]:
    signature = {"rows_ptr": "*bf16", "index_ptr": index, "weights_ptr": "*fp32", "out_ptr": "*bf16", "num_out": "i32"}
    strides = {"rows_stride": "i32:16", "index_stride": "i32", "weights_stride": "i32", "out_stride": "i32:16"}
    constants = {"D": hidden, "J": rows, "WEIGHED": is_weighed, "ZEROS": not is_weighed, "WIDE": tl.float32}
    constants |= {"BLOCK_N": 1, "BLOCK_D": 1024, "EXACT": False}
    if not is_weighed:
        constants["weights_ptr"] = None
        del signature["weights_ptr"]
    return _entry(f"add rows, {title}", add_kernel, signature | strides, constants)


def _signature(pointers: dict[str, str], numbers: tuple[str, ...]) -> dict[str, str]:
    return {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(numbers, "i32")


def _entry(title: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": title,
        "kernel": kernel,
        "signature": signature,
        "constants": constants,
        "options": {"num_warps": 4, "num_stages": 2},
        "must": set(),
    }
