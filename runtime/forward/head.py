"""The head: rows of the last layer to logits, in float32 or wider, behind the name of whose kernels run.

Sixteen-bit logits would tie where the model does not. The head is the largest of the matrices; where its float32 values
are those of a bfloat16 checkpoint, kernels of a processor read a packed copy at half the bytes, to the same products.

Shapes: B rows that get logits, D model, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from ep.ops import import_kernels

__all__ = ["Head", "head_of"]

Head = Callable[[Tensor], Tensor]
"""[B, D] in the run dtype to [B, V] in the head's."""


def head_of(ops: str, head_VD: Tensor) -> Head:
    """With the kernels of that name. Weights must not change afterwards."""
    return HEADS[ops](head_VD)


def _in_torch(head_VD: Tensor) -> Head:
    return lambda h_BD: linear(h_BD.to(head_VD.dtype), head_VD)


def _packed(head_VD: Tensor) -> Head:
    narrow_VD = head_VD.to(torch.bfloat16)
    if not torch.equal(narrow_VD.to(head_VD.dtype), head_VD):
        return _in_torch(head_VD)
    matmul, panels = (import_kernels(f"ep.cpu.{name}", None) for name in ("matmul", "panels"))
    packed = panels.pack(narrow_VD)
    return lambda h_BD: matmul.logits(h_BD, packed)


HEADS: dict[str, Callable[[Tensor], Head]] = {"reference": _in_torch, "numba": _packed, "triton": _in_torch}
