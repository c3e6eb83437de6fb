"""The room's kernels at the sizes of real models, for whoever compiles them without a device.

A line is a dict: `title`; the `kernel`; `signature`, the types of its runtime arguments (pointers are 16-byte aligned,
"i32:16" is a multiple of 16); `constants`; `options` of the compiler; and what the machine code `must` contain.
Needs triton. Knows sizes, not times.

Letters: H heads, D model, C latent rank, P rope dim.
"""

from typing import Any

import torch

from .append_kernels import _append_kernel, _turn_kernel, append_constants, turn_constants
from .decode_kernels import ATTEND_OPTIONS, _attend_kernel, attend_constants
from .latent_rows import LatentRows, fp8_row_bytes
from .linear_kernels import LINEAR_OPTIONS, _fp8_linear_kernel, linear_constants
from .merge_kernels import MERGE_OPTIONS, _merge_kernel, merge_constants
from .norm_kernels import _add_norm_kernel, norm_constants, norm_options
from .quant_kernels import _quantise_kernel, quantise_constants
from .work_kernels import Work, _plan_kernel, plan_constants

__all__ = ["kernel_shapes"]

Shape = dict[str, Any]

RANK, ROPE_DIM, PAGE = 512, 64, 64
"""Of all models of this family."""
SPLIT = 2048
HEADS = {"V3": 128, "K2": 64, "GLM-4.7-Flash": 20, "V2-Lite": 16}
LINEARS = {"down": (2112, 7168), "q_b": (24576, 1536), "o": (7168, 16384)}
"""(outputs, inputs) of V3's projections."""


def kernel_shapes() -> list[Shape]:
    """One dict for each kernel and size."""
    shapes = [_attend(model, heads, fp8=fp8) for model, heads in HEADS.items() for fp8 in (False, True)]
    shapes += [_merge("V3", HEADS["V3"]), _plan("V3", HEADS["V3"])]
    shapes += [_append(fp8=False), _append(fp8=True), _turn("V3", HEADS["V3"])]
    shapes += [
        _norm("V3 hidden", 7168, fp8=False),
        _norm("V3 hidden", 7168, fp8=True),
        _norm("V3 query", 1536, fp8=True),
    ]
    shapes += [_quantise("V3 heads", 16384)]
    return shapes + [_linear(f"V3 {name}", outputs, inputs) for name, (outputs, inputs) in LINEARS.items()]


def _rows(*, fp8: bool) -> LatentRows:
    if fp8:
        width = fp8_row_bytes(RANK, ROPE_DIM)
        return LatentRows.fp8(torch.empty(1, width, dtype=torch.uint8, device="meta"), rank=RANK, rope_dim=ROPE_DIM)
    return LatentRows.plain(torch.empty(1, RANK + ROPE_DIM, dtype=torch.bfloat16, device="meta"), RANK)


def _work(heads: int) -> Work:
    nothing = torch.empty(0, device="meta")
    return Work(request_I=nothing, first_item_B=nothing, num_heads=heads, split_tokens=SPLIT)


def _row_pointers(*, fp8: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constants of a cache row's three pointers."""
    if fp8:
        return {"latents_NC": "*fp8e4nv", "scales_NG": "*fp32", "rope_NP": "*bf16"}, {}
    return {"latents_NC": "*bf16", "rope_NP": "*bf16"}, {"scales_NG": None}


def _attend(model: str, heads: int, *, fp8: bool) -> Shape:
    pointers, none = _row_pointers(fp8=fp8)
    names = ("pages_G", "first_page_B", "first_token_B", "num_tokens_B", "context_B")
    strides = ("absorbed_stride_t", "absorbed_stride_h", "rope_stride_t", "rope_stride_h")
    return {
        "title": f"attend {'fp8' if fp8 else 'bf16'}, {model}, {heads} heads",
        "kernel": _attend_kernel,
        "signature": {
            "absorbed_THC": "*bf16",
            "rope_THP": "*bf16",
            **pointers,
            **dict.fromkeys(names, "*i64"),
            "request_I": "*i32",
            "first_item_B": "*i32",
            "mean_IMC": "*fp32",
            "lse_IM": "*fp32",
            "out_THC": "*bf16",
            "num_requests": "i32",
            "score_scale": "fp32",
            **dict.fromkeys(strides, "i32:16"),
        },
        "constants": none | attend_constants(_rows(fp8=fp8), _work(heads), page_size=PAGE, dtype=torch.bfloat16),
        "options": ATTEND_OPTIONS,
        "must": {"wgmma", "cp.async"} if heads > 16 else {"cp.async"},
    }


def _merge(model: str, heads: int) -> Shape:
    names = ("first_token_B", "num_tokens_B", "context_B")
    return {
        "title": f"merge splits, {model}, {heads} heads",
        "kernel": _merge_kernel,
        "signature": {
            "mean_IMC": "*fp32",
            "lse_IM": "*fp32",
            **dict.fromkeys(names, "*i64"),
            "first_item_B": "*i32",
            "out_THC": "*bf16",
        },
        "constants": merge_constants(_work(heads), RANK),
        "options": MERGE_OPTIONS,
        "must": set(),
    }


def _plan(model: str, heads: int) -> Shape:
    return {
        "title": f"plan work, {model}, 256 requests",
        "kernel": _plan_kernel,
        "signature": {
            "context_B": "*i64",
            "num_tokens_B": "*i64",
            "request_I": "*i32",
            "first_item_B": "*i32",
            "num_requests": "i32",
        },
        "constants": plan_constants(_work(heads), 256),
        "options": {},
        "must": set(),
    }


def _append(*, fp8: bool) -> Shape:
    pointers, none = _row_pointers(fp8=fp8)
    inputs = ("latent_TC", "rope_TP", "norm_C")
    return {
        "title": f"norm, turn, append {'fp8' if fp8 else 'bf16'}",
        "kernel": _append_kernel,
        "signature": {
            **dict.fromkeys(inputs, "*bf16"),
            "turns_TP": "*fp32",
            "places_T": "*i64",
            **pointers,
            "latent_stride": "i32:16",
            "rope_stride": "i32:16",
        },
        "constants": none | append_constants(_rows(fp8=fp8), eps=1e-6, interleaved=True, dtype=torch.bfloat16),
        "options": {},
        "must": set(),
    }


def _turn(model: str, heads: int) -> Shape:
    return {
        "title": f"turn queries, {model}, {heads} heads",
        "kernel": _turn_kernel,
        "signature": {
            "rope_THP": "*bf16",
            "turns_TP": "*fp32",
            "out_THP": "*bf16",
            "stride_t": "i32:16",
            "stride_h": "i32:16",
        },
        "constants": turn_constants(heads, ROPE_DIM, interleaved=True, dtype=torch.bfloat16),
        "options": {},
        "must": set(),
    }


def _norm(what: str, dim: int, *, fp8: bool) -> Shape:
    scales: dict[str, Any] = {"scales_TG": "*fp32"} if fp8 else {}
    inputs = ("x_TD", "update_TD", "weight_D", "sum_TD")
    return {
        "title": f"add and norm{' to fp8' if fp8 else ''}, {what}, {dim}",
        "kernel": _add_norm_kernel,
        "signature": {
            **dict.fromkeys(inputs, "*bf16"),
            "h_TD": "*fp8e4nv" if fp8 else "*bf16",
            **scales,
            "x_stride": "i32:16",
            "update_stride": "i32:16",
        },
        "constants": ({} if fp8 else {"scales_TG": None})
        | norm_constants(dim, eps=1e-6, add=True, fp8=fp8, dtype=torch.bfloat16),
        "options": norm_options(dim),
        "must": set(),
    }


def _quantise(what: str, dim: int) -> Shape:
    return {
        "title": f"quantise, {what}, {dim}",
        "kernel": _quantise_kernel,
        "signature": {"x_TD": "*bf16", "values_TD": "*fp8e4nv", "scales_TG": "*fp32", "x_stride": "i32:16"},
        "constants": quantise_constants(dim),
        "options": {},
        "must": set(),
    }


def _linear(what: str, num_outputs: int, dim: int) -> Shape:
    return {
        "title": f"fp8 linear, {what}, {dim} to {num_outputs}",
        "kernel": _fp8_linear_kernel,
        "signature": {
            "x_TD": "*fp8e4nv",
            "x_scales_TG": "*fp32",
            "weight_ND": "*fp8e4nv",
            "weight_scales_QG": "*fp32",
            "out_TN": "*bf16",
            "num_tokens": "i32",
        },
        "constants": linear_constants(num_outputs, dim),
        "options": LINEAR_OPTIONS,
        "must": {"wgmma", "cp.async"},
    }
