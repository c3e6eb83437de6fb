"""The room's kernels at the sizes of real models, for whoever compiles them without a device.

A line is a dict in the words of `attention_mla.kernel_shapes`. Needs triton.
"""

from typing import Any

from .sampler_kernels import (
    CHOOSE_OPTIONS,
    PENALISE_OPTIONS,
    _choose_kernel,
    _count_kernel,
    _penalise_kernel,
    choose_constants,
    count_constants,
)

__all__ = ["kernel_shapes"]

VOCABULARY = 129280
"""Of V3; no other size is special."""


def kernel_shapes() -> list[dict[str, Any]]:
    """One dict for each kernel and size."""
    return [_choose(edited=False), _choose(edited=True), _count(), _penalise()]


def _choose(*, edited: bool) -> dict[str, Any]:
    return {
        "title": f"choose a token, {'edited logits' if edited else 'logits as given'}, {VOCABULARY} tokens",
        "kernel": _choose_kernel,
        "signature": {
            "logits_BV": "*fp32",
            **({"x_nV": "*fp64"} if edited else {}),
            "rows_n": "*i64",
            "ints_KB": "*i64",
            "floats_KB": "*fp64",
            "token_B": "*i64",
            "ok_B": "*i1",
            "num_rows": "i32",
        },
        "constants": ({} if edited else {"x_nV": None}) | choose_constants(VOCABULARY, edited=edited),
        "options": CHOOSE_OPTIONS,
        "must": set(),
    }


def _count() -> dict[str, Any]:
    return {
        "title": f"count a history, {VOCABULARY} tokens",
        "kernel": _count_kernel,
        "signature": {
            "tokens_SH": "*i64",
            "columns_KN": "*i64",
            "counts_nV": "*i32",
            "num_rows": "i32",
            "H": "i32",
        },
        "constants": count_constants(VOCABULARY),
        "options": {},
        "must": set(),
    }


def _penalise() -> dict[str, Any]:
    return {
        "title": f"penalise, {VOCABULARY} tokens",
        "kernel": _penalise_kernel,
        "signature": {"x_nV": "*fp64", "counts_nV": "*i32", "penalties_KN": "*fp64", "num_rows": "i32"},
        "constants": count_constants(VOCABULARY),
        "options": PENALISE_OPTIONS,
        "must": set(),
    }
