"""A block's parts in Triton's kernels, but for matmuls with plain weights, which are torch's; see `ops`.

Prompts, whose keys and values are up-projected, go through torch's flash attention. The host waits for nothing.

Letters: T tokens here, D model, H heads, C latent rank, P rope dim, V value head size, R decode rows, N outputs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ep.ops import import_kernels

from .absorbed import Absorbed
from .cache import LatentCache
from .config import MlaConfig
from .latent_rows import FP8, Latents
from .matrix import Fp8Matrix, Fp8Rows, Matrix, Rows, num_blocks, plain
from .prompt import flash_attention
from .reference import Queries
from .rope import Rotation
from .scaled_products import ChosenProduct, timed_us, torch_product
from .view import PagedView
from .weights import MlaWeights

__all__ = ["TritonOps"]

SPLIT_TOKENS = 2048
"""Of Triton's decode attention. A split costs two passes over 256 KiB of sums a token at 128 heads, so there should be
few; but a batch too small to fill the device waits for its longest split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Of one step: `requests` with their tokens closed up to 0 .. R, in which order `tokens_R` lists them."""

    tokens_R: Tensor
    requests: Absorbed
    work: Any
    scratch: Any


class TritonOps:
    """See `ops.AttentionOps`. `comm_sms` multiprocessors are left to whoever sends rows. `chosen`: on a GPU, whose
    products of fp8 blocks run."""

    def __init__(self, *, comm_sms: int = 0, split_tokens: int = SPLIT_TOKENS) -> None:
        self._comm_sms = comm_sms
        self._split_tokens = split_tokens
        self._append, self._norm, self._quant, self._linear, self._work, self._decode, self._merge = (
            import_kernels(f".{name}_kernels", __package__)
            for name in ("append", "norm", "quant", "linear", "work", "decode", "merge")
        )
        self.chosen = ChosenProduct(self._product, torch_product, timed_us=timed_us)

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> DecodePlan:
        """Lists the work of the decode rows, on the device."""
        tokens_R = view.decode.tokens_R.sort().values
        absorbed = view.absorbed
        num_tokens_B = absorbed.num_tokens_B
        requests = replace(absorbed, first_token_B=num_tokens_B.cumsum(0) - num_tokens_B)
        work = self._work.Work.room_for(requests, num_heads=config.num_heads, split_tokens=self._split_tokens)
        self._work.plan_work(requests, work)
        scratch = self._work.Scratch.room_for(work, config.kv_lora_rank, dtype)
        return DecodePlan(tokens_R=tokens_R, requests=requests, work=work, scratch=scratch)

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
        interleaved = config.rope.interleaved
        self._append.append(
            latents.latent_TC,
            latents.rope_TP,
            norm_C=norm_C,
            eps=config.latent_norm_eps,
            rotation=rotation,
            interleaved=interleaved,
            places_T=view.places_T,
            rows=cache.rows(layer),
        )
        turned_THP = torch.empty(rope_THP.shape, dtype=rope_THP.dtype, device=rope_THP.device)
        self._append.turn_queries(rope_THP, rotation=rotation, interleaved=interleaved, out_THP=turned_THP)
        return turned_THP

    def attend(
        self,
        queries: Queries,
        weights: MlaWeights,
        *,
        plan: DecodePlan,
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        if view.decode.num_rows:
            own = queries if not view.prompts else queries.take(plan.tokens_R)
            self._attend_absorbed(own, weights, plan, config=config, cache=cache, layer=layer, out_THV=out_THV)
        for prompt in view.prompts:
            out_THV[prompt.tokens] = flash_attention(
                queries.part(prompt.tokens),
                weights,
                latents=cache.rows(layer),
                prompt=prompt,
                softmax_scale=config.softmax_scale,
            )

    def _attend_absorbed(
        self,
        own: Queries,
        weights: MlaWeights,
        plan: DecodePlan,
        *,
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        out_THV: Tensor,
    ) -> None:
        """Decode rows, `own` queries in the order of the plan's tokens."""
        w_uk_HNC, w_uv_HCV = weights.heads
        absorbed_HRC = torch.bmm(own.nope_THN.transpose(0, 1), w_uk_HNC)
        latent_RHC = absorbed_HRC.new_empty(plan.tokens_R.shape[0], config.num_heads, config.kv_lora_rank)
        self._decode.attend(
            absorbed_HRC.transpose(0, 1),
            own.rope_THP,
            cache.rows(layer),
            requests=plan.requests,
            work=plan.work,
            page_size=cache.page_size,
            score_scale=config.softmax_scale,
            num_programs=self._num_programs(latent_RHC.device),
            scratch=plan.scratch,
            out_THC=latent_RHC,
        )
        self._merge.merge_splits(plan.scratch, requests=plan.requests, work=plan.work, out_THC=latent_RHC)
        heads_HRV = torch.bmm(latent_RHC.transpose(0, 1), w_uv_HCV)
        out_THV.index_copy_(0, plan.tokens_R, heads_HRV.transpose(0, 1))

    def linear(self, x: Rows, matrix: Matrix) -> Tensor:
        if isinstance(matrix, Tensor):
            return functional.linear(plain(x), matrix)
        if isinstance(x, Tensor):
            x_TD, x = x, _fp8_rows(x)
            self._quant.quantise(x_TD, values_TD=x.values_TD, scales_TG=x.scales_TG)
        return self.chosen(x, matrix) if matrix.values_ND.is_cuda else self._product(x, matrix)

    def _product(self, rows: Fp8Rows, matrix: Fp8Matrix) -> Tensor:
        values_TD, device = rows.values_TD, rows.values_TD.device
        out_TN = torch.empty(values_TD.shape[0], matrix.values_ND.shape[0], dtype=rows.dtype, device=device)
        self._linear.fp8_linear(values_TD, rows.scales_TG, matrix.values_ND, matrix.scales_QG, out_TN=out_TN)
        return out_TN

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, *, before: Matrix | None = None) -> Rows:
        return self.add_norm(x_TD, None, weight_D, eps, before=before)[1]

    def add_norm(
        self, x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float, *, before: Matrix | None = None
    ) -> tuple[Tensor, Rows]:
        sum_TD = None if update_TD is None else _empty_like(x_TD)
        if isinstance(before, Fp8Matrix):
            h = _fp8_rows(x_TD)
            into = {"sum_TD": sum_TD, "h_TD": h.values_TD, "scales_TG": h.scales_TG}
            self._norm.add_norm_fp8(x_TD, update_TD, weight_D, eps, **into)
        else:
            h = _empty_like(x_TD)
            self._norm.add_norm(x_TD, update_TD, weight_D, eps, sum_TD=sum_TD, h_TD=h)
        return x_TD if sum_TD is None else sum_TD, h

    def _num_programs(self, device: torch.device) -> int:
        if device.type == "cpu":
            return 1  # the interpreter runs one after the other
        return torch.cuda.get_device_properties(device).multi_processor_count - self._comm_sms


def _empty_like(x_TD: Tensor) -> Tensor:
    return torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)  # contiguous, where x may be part of more


def _fp8_rows(x_TD: Tensor) -> Fp8Rows:
    """Room for as many rows in fp8."""
    num_tokens, width = x_TD.shape
    return Fp8Rows(
        values_TD=torch.empty(num_tokens, width, dtype=FP8, device=x_TD.device),
        scales_TG=torch.empty(num_tokens, num_blocks(width), device=x_TD.device),
        dtype=x_TD.dtype,
    )
