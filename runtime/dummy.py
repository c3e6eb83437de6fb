"""Random weights without a file: the same numbers for a name and seed, whatever rank or run asks for them.

Scaled so that activations and logits stay near unit size. A model whose config says fp8 gets fp8 experts, so that the
path that keeps them quantised runs too; everything else is plain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moe.quant import BLOCK, dequantize_blocks, num_blocks, quantize_blocks

from .model_config import ModelConfig
from .model_shapes import EMBED, Shape

# Numbers drawn at a time, a whole number of rows: small enough for memory, and fixed, so that the sequence is.
_PIECE = 1 << 22
_BIAS_WIDTH = 0.1


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
        """Routed experts of a model whose config says fp8."""
        return self._fp8 and ".mlp.experts." in name

    def stored_bytes(self, name: str) -> int:  # noqa: ARG002
        """Nothing is read."""
        return 0

    def read_into(self, name: str, out: Tensor) -> None:
        """Draw `out`; an fp8 tensor is quantised and back, so that it equals what `read_fp8_into` gives."""
        if self.is_fp8(name):
            values, scale_inv = self._quantized(name, out.shape)
            out.copy_(dequantize_blocks(values, scale_inv, out.dtype))
            return
        width = _width(name, out.shape)
        if width == 0.0:
            out.fill_(1.0)
            return
        generator = self._generator(name)
        rows = max(_PIECE // max(math.prod(out.shape[1:]), 1), 1)
        for part in out.split(rows):
            part.copy_(torch.empty(part.shape, dtype=torch.float32).uniform_(-width, width, generator=generator))

    def read_fp8_into(self, name: str, out: Tensor, scale_inv: Tensor) -> None:
        """Draw and quantise in 128 x 128 blocks."""
        assert scale_inv.shape == (num_blocks(out.shape[0]), num_blocks(out.shape[1])), f"blocks of {BLOCK}"
        values, scales = self._quantized(name, out.shape)
        out.copy_(values)
        scale_inv.copy_(scales)

    def _quantized(self, name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
        width = _width(name, shape)
        drawn = torch.empty(shape, dtype=torch.float32).uniform_(-width, width, generator=self._generator(name))
        return quantize_blocks(drawn)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _width(name: str, shape: torch.Size | Shape) -> float:
    """Half the width of the uniform distribution: unit variance for what goes in, 0 for norms, which are ones."""
    if name.endswith("e_score_correction_bias"):
        return _BIAS_WIDTH
    if len(shape) == 1:
        return 0.0
    fan_in = 1 if name == EMBED else shape[1]
    return math.sqrt(3.0 / fan_in)
