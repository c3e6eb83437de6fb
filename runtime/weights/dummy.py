"""Random weights without a file: the same numbers for a name and seed, whatever rank or run asks for them.

Scaled so that activations and logits stay near unit size. A model whose config says fp8 gets fp8 where published files
have it: in all linear layers but the head and the router. Numbers are drawn on the device where they go, each kind of
device by its own generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe.quant import dequantize_blocks, quantize_blocks

from ..model.model_config import ModelConfig
from ..model.model_shapes import EMBED, Shape
from .checkpoint import Wanted
from .progress import Progress

# Numbers drawn at a time, a whole number of rows: small enough for memory, and fixed, so that the sequence is.
_PIECE = 1 << 22
_BIAS_WIDTH = 0.1
_PROJECTIONS = ("_proj.weight", "_proj_with_mqa.weight")


class DummyCheckpoint:
    """A `TensorSource` that knows no files."""

    def __init__(self, model: ModelConfig, *, seed: int = 0) -> None:
        self.notes = (f"random weights with seed {seed}: what comes out has no meaning",)
        self.bytes_read = 0
        self._seed = seed
        self._fp8 = model.quantization is not None

    def verify(self, shapes: Mapping[str, Shape]) -> None:
        """Every tensor can be drawn."""

    def is_fp8(self, name: str) -> bool:
        """Projections of a model whose config says fp8."""
        return self._fp8 and name.endswith(_PROJECTIONS)

    def stored_bytes(self, name: str) -> int:  # noqa: ARG002
        """Nothing is read."""
        return 0

    def read(self, wanted: Sequence[Wanted], *, progress: Progress | None = None) -> None:  # noqa: ARG002
        """Draw all of these; a tensor that is quantised and back equals what it is when it stays quantised."""
        for each in wanted:
            if self.is_fp8(each.name):
                self._quantize_into(each)
            else:
                self._draw_into(each.name, each.out)

    def _quantize_into(self, wanted: Wanted) -> None:
        values, scale_inv = self._quantized(wanted.name, wanted.out.shape, wanted.out.device)
        if wanted.scale_inv is None:
            wanted.out.copy_(dequantize_blocks(values, scale_inv, wanted.out.dtype))
        else:
            wanted.out.copy_(values)
            wanted.scale_inv.copy_(scale_inv)

    def _draw_into(self, name: str, out: Tensor) -> None:
        width = _width(name, out.shape)
        if width == 0.0:
            out.fill_(1.0)
            return
        generator = self._generator(name, out.device)
        rows = max(_PIECE // max(math.prod(out.shape[1:]), 1), 1)
        for part in out.split(rows):
            drawn = torch.empty(part.shape, dtype=torch.float32, device=out.device)
            part.copy_(drawn.uniform_(-width, width, generator=generator))

    def _quantized(self, name: str, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        width = _width(name, shape)
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        return quantize_blocks(drawn.uniform_(-width, width, generator=self._generator(name, device)))

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _width(name: str, shape: torch.Size | Shape) -> float:
    """Half the width of the uniform distribution: unit variance for what goes in, 0 for norms, which are ones."""
    if name.endswith("e_score_correction_bias"):
        return _BIAS_WIDTH
    if len(shape) == 1:
        return 0.0
    fan_in = 1 if name == EMBED else shape[1]
    return math.sqrt(3.0 / fan_in)
