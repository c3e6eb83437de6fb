"""A block's parts on a processor in bf16, in Numba's kernels (`cpu_kernels`, `ep.cpu`): a call each; packed weights.

Short prompts run as decode rows, which takes no more sums than keys and values of their own would; long ones go through
torch's flash attention. An fp8 cache is written and read in torch.

Letters: T tokens here, D model, H heads, N query/key head size without rope, C latent rank, P rope dim, V value head
size, R decode rows, G pages of a request.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ep.cpu.calls import words_of
from ep.cpu.matmul import linear, multiply
from ep.cpu.panels import Packed, pack
from ep.cpu.threads import num_threads, torch_threads
from ep.cpu.tile import ROWS

from .cache import LatentCache
from .config import MlaConfig
from .cpu_kernels import BLOCK, MOST_HEADS, append, attend, norm
from .latent_rows import Latents
from .matrix import Matrix, Rows, plain
from .page_table import Column
from .prompt import flash_attention
from .reference import Queries
from .reference_ops import ReferenceOps
from .rope import Rotation
from .view import PagedView, Prompt
from .weights import MlaWeights

__all__ = ["NumbaOps"]

SHORT = 256
"""Tokens of a prompt up to which it runs as decode rows."""
PART_ROWS = 256
"""Rows whose queries and means over latents exist at once: few enough to stay in a CPU's cache, and not to be memory
that is fresh at every call."""
NORM_VALUES = 4096
"""That a thread norms at a time."""
APPENDED = 4
"""Tokens that a thread appends at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows that run at once, longest context first."""

    rows: slice
    order_R: Column
    """Where among these rows each one's query is."""
    positions_R: Column
    pages_RG: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendPlan:
    """What runs as decode rows in a step, and the prompts that do not."""

    tokens_R: Column | None
    """Of T, ascending; None where every token is a row."""
    parts: tuple[Part, ...]
    prompts: tuple[Prompt, ...]


class NumbaOps(ReferenceOps):
    """See `ops.AttentionOps`. Weights are packed when they are first used, and must not change afterwards."""

    def __init__(self, *, comm_sms: int = 0) -> None:
        super().__init__(comm_sms=comm_sms)
        # What was packed is kept beside it, so that nothing else can get its id.
        self._matrices: dict[int, tuple[Tensor, Packed]] = {}
        self._heads: dict[int, tuple[MlaWeights, Packed, Packed]] = {}

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> AttendPlan:  # noqa: ARG002
        """Where rows lie, looked up on the host."""
        prompts = tuple([prompt for prompt in view.prompts if prompt.tokens.stop - prompt.tokens.start > SHORT])
        is_row_T = np.ones(view.num_tokens, dtype=np.bool_)
        for prompt in prompts:
            is_row_T[prompt.tokens] = False
        (tokens_R,) = is_row_T.nonzero()
        parts = tuple([_part(view, tokens_R, begin) for begin in range(0, len(tokens_R), PART_ROWS)])
        return AttendPlan(tokens_R=tokens_R if prompts else None, parts=parts, prompts=prompts)

    def append(
        self,
        latents: Latents,
        rope_THP: Tensor,
        norm_C: Tensor,
        *,
        config: MlaConfig,
        rotation: Rotation,
        cache: LatentCache,
        layer: int,
        view: PagedView,
    ) -> Tensor:
        if cache.row.fp8:
            shared: dict[str, Any] = {"cache": cache, "layer": layer, "view": view}
            return super().append(latents, rope_THP, norm_C, config=config, rotation=rotation, **shared)
        _check(latents.latent_TC, latents.rope_TP, rope_THP, norm_C)
        stored_NW, turned_THP = cache.rows(layer).stored_NX, rope_THP.new_empty(rope_THP.shape)
        num_tokens, num_heads, rope_dim = rope_THP.shape
        cleared_J, turn_TP2 = view.cleared_alone_J, rotation.turn_TP2.contiguous()
        append(
            -(-num_tokens // APPENDED) - (-cleared_J.shape[0] // BLOCK),
            latents.latent_TC.data_ptr(),
            2 * latents.latent_TC.stride(0),
            latents.rope_TP.data_ptr(),
            2 * latents.rope_TP.stride(0),
            norm_C.data_ptr(),
            turn_TP2.data_ptr(),
            view.places_T.data_ptr(),
            stored_NW.data_ptr(),
            stored_NW.shape[0],
            config.kv_lora_rank,
            rope_dim,
            rope_THP.data_ptr(),
            2 * rope_THP.stride(0),
            2 * rope_THP.stride(1),
            num_heads,
            turned_THP.data_ptr(),
            num_tokens,
            APPENDED,
            cleared_J.data_ptr(),
            cleared_J.shape[0],
            config.rope.interleaved,
            *words_of(config.latent_norm_eps),
        )
        return turned_THP

    def attend(
        self,
        queries: Queries,
        weights: MlaWeights,
        *,
        plan: AttendPlan,
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        if cache.row.fp8:
            shared: dict[str, Any] = {"config": config, "cache": cache, "layer": layer, "view": view}
            with torch_threads():
                super().attend(queries, weights, plan=None, out_THV=out_THV, **shared)
            return
        shared = {"config": config, "cache": cache, "layer": layer}
        if plan.tokens_R is None:
            self._attend_rows(queries, weights, plan.parts, out_RHV=out_THV, **shared)
        elif plan.parts:
            tokens_R = torch.from_numpy(plan.tokens_R)
            heads_RHV = out_THV.new_empty(len(plan.tokens_R), *out_THV.shape[1:])
            self._attend_rows(queries.take(tokens_R), weights, plan.parts, out_RHV=heads_RHV, **shared)
            out_THV.index_copy_(0, tokens_R, heads_RHV)
        if plan.prompts:
            over = {"latents": cache.rows(layer), "softmax_scale": config.softmax_scale}
            with torch_threads():
                for prompt in plan.prompts:
                    part = queries.part(prompt.tokens)
                    out_THV[prompt.tokens] = flash_attention(part, weights, prompt=prompt, **over)

    def _attend_rows(
        self,
        queries: Queries,
        weights: MlaWeights,
        parts: tuple[Part, ...],
        *,
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        out_RHV: Tensor,
    ) -> None:
        w_uk, w_uv = self._packed_heads(weights)
        num_heads, rank = config.num_heads, config.kv_lora_rank
        absorbed_RHC, mean_RHC = out_RHV.new_empty(2, min(PART_ROWS, out_RHV.shape[0]), num_heads, rank)
        rope_RHP, stored_NW = queries.rope_THP.contiguous(), cache.rows(layer).stored_NX
        for part in parts:
            num_rows = len(part.order_R)
            heads = _heads_at_once(num_rows, num_heads)
            groups = -(-num_heads // heads)
            multiply(queries.nope_THN[part.rows].transpose(0, 1), w_uk, absorbed_RHC[:num_rows].transpose(0, 1))
            attend(
                num_rows * groups,
                absorbed_RHC.data_ptr(),
                rope_RHP[part.rows].data_ptr(),
                mean_RHC.data_ptr(),
                part.order_R.ctypes.data,
                groups,
                heads,
                part.positions_R.ctypes.data,
                part.pages_RG.ctypes.data,
                part.pages_RG.shape[1],
                cache.page_size,
                stored_NW.data_ptr(),
                rank,
                config.qk_rope_head_dim,
                num_heads,
                *words_of(config.softmax_scale),
            )
            multiply(mean_RHC[:num_rows].transpose(0, 1), w_uv, out_RHV[part.rows].transpose(0, 1))

    def linear(self, x: Rows, matrix: Matrix) -> Tensor:
        weight_ND = plain(matrix)
        if id(weight_ND) not in self._matrices:
            self._matrices[id(weight_ND)] = weight_ND, pack(weight_ND)
        return linear(plain(x), self._matrices[id(weight_ND)][1])

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, *, before: Matrix | None = None) -> Tensor:
        return self.add_norm(x_TD, None, weight_D, eps, before=before)[1]

    def add_norm(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        *,
        before: Matrix | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        _check(x_TD, weight_D)
        num_tokens, size = x_TD.shape
        some, h_TD, sum_TD = max(1, NORM_VALUES // size), x_TD.new_empty(x_TD.shape), x_TD
        if update_TD is not None:
            _check(update_TD)
            sum_TD = x_TD.new_empty(x_TD.shape)
        norm(
            -(-num_tokens // some),
            x_TD.data_ptr(),
            2 * x_TD.stride(0),
            0 if update_TD is None else update_TD.data_ptr(),
            0 if update_TD is None else 2 * update_TD.stride(0),
            sum_TD.data_ptr(),
            h_TD.data_ptr(),
            weight_D.data_ptr(),
            num_tokens,
            size,
            some,
            *words_of(eps),
        )
        return sum_TD, h_TD

    def _packed_heads(self, weights: MlaWeights) -> tuple[Packed, Packed]:
        """W_UK from N to C and W_UV from C to V, heads as groups."""
        if id(weights) not in self._heads:
            keys_HCN, values_HVC = weights.w_uk_HNC.transpose(1, 2), weights.w_uv_HVC
            self._heads[id(weights)] = weights, pack(*keys_HCN), pack(*values_HVC)
        return self._heads[id(weights)][1:]


def _part(view: PagedView, tokens_R: Column, begin: int) -> Part:
    """The tokens from number `begin` on that run at once."""
    rows = slice(begin, min(begin + PART_ROWS, len(tokens_R)))
    positions_R, slots_R = view.tokens.positions_T[tokens_R[rows]], view.tokens.slots_T[tokens_R[rows]]
    order_R = (-positions_R).argsort(kind="stable")
    num_pages = int(positions_R.max()) // view.table.page_size + 1
    return Part(
        rows=rows,
        order_R=order_R,
        positions_R=positions_R[order_R],
        pages_RG=np.ascontiguousarray(view.table.pages_SG[slots_R[order_R], :num_pages]),
    )


def _heads_at_once(num_rows: int, num_heads: int) -> int:
    """As many as share a row's latents best; half of that where threads would have nothing to do."""
    most = min(ROWS, MOST_HEADS)
    if num_rows * -(-num_heads // most) < 2 * num_threads():
        most = min(most, 4)
    return most


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype is torch.bfloat16, f"{tensor.dtype} where kernels read bfloat16"
        assert tensor.stride(-1) == 1, f"strides {tensor.stride()}: the last side is dense"
