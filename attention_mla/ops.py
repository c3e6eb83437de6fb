"""What an attention block computes on a device, behind one name: in torch, or in Triton's kernels.

Chosen once, at start. Matmuls with weights are torch's in both; prompts, whose keys and values are up-projected, go
through torch's flash attention where decode rows go through Triton.
Knows no order of things: that is the layer's.

Letters: T tokens here, D model, H heads, C latent rank, P rope dim, V value head size, R decode rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from .absorbed import Absorbed
from .cache import LatentCache
from .config import MlaConfig
from .norm import rms_norm
from .prompt import flash_attention
from .reference import Queries, absorbed_attention, naive_attention
from .rope import Rotation, rotate
from .view import PagedView
from .weights import MlaWeights

__all__ = ["REFERENCE", "AttentionOps", "Latents", "attention_ops", "interpreted"]

SPLIT_TOKENS = 2048
"""Of Triton's decode attention. A split costs two passes over 256 KiB of sums a token at 128 heads, so there should be
few; but a batch too small to fill the device waits for its longest split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """What a token leaves in the cache, before norm and rotation."""

    latent_TC: Tensor
    rope_TP: Tensor


class AttentionOps(Protocol):
    """The parts of a block that are not matmuls with weights."""

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> Any:
        """What all layers of a step share; `attend` is given it. `dtype` is the run's."""
        ...

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
        """Norm and turn the latents and write them to the view's places; returns the queries' rope part, turned."""
        ...

    def attend(
        self,
        queries: Queries,
        weights: MlaWeights,
        *,
        plan: Any,
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        """Every token of the view over its own context, all read from the cache."""
        ...

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """`norm.rms_norm`."""
        ...

    def add_norm(self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + update, its norm)."""
        ...


class ReferenceOps:
    """In torch, on any device."""

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> None:  # noqa: ARG002
        return None

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
        latent_TC = rms_norm(latents.latent_TC, norm_C, config.latent_norm_eps)
        cache.clear(layer, view.cleared_J)
        cache.append(
            layer, torch.cat((latent_TC, rotate(latents.rope_TP, rotation, interleaved)), dim=-1), view.places_T
        )
        return rotate(rope_THP, rotation, interleaved)

    def attend(
        self,
        queries: Queries,
        weights: MlaWeights,
        *,
        plan: None,  # noqa: ARG002
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        over = {"latents": cache.rows(layer), "softmax_scale": config.softmax_scale}
        rows = view.decode
        if rows.num_rows:
            heads_RHV = absorbed_attention(queries.take(rows.tokens_R), weights, rows=rows, **over)
            out_THV.index_copy_(0, rows.tokens_R, heads_RHV)
        for prompt in view.prompts:
            part = queries.part(prompt.tokens)
            out_THV[prompt.tokens] = naive_attention(part, weights, prompt=prompt, **over)

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def add_norm(self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_TD = x_TD + update_TD
        return sum_TD, rms_norm(sum_TD, weight_D, eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Of one step: `requests` with their tokens closed up to 0 .. R, in which order `tokens_R` lists them."""

    tokens_R: Tensor
    requests: Absorbed
    work: Any
    scratch: Any


class TritonOps:
    """In Triton's kernels; the host waits for nothing. `comm_sms` multiprocessors are left to whoever sends rows."""

    def __init__(self, *, comm_sms: int = 0, split_tokens: int = SPLIT_TOKENS) -> None:
        self._comm_sms = comm_sms
        self._split_tokens = split_tokens
        self._append, self._norm = _import("append_kernels"), _import("norm_kernels")
        self._work, self._decode, self._merge = (_import(f"{name}_kernels") for name in ("work", "decode", "merge"))

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
        absorbed_HRC = torch.bmm(own.nope_THN.transpose(0, 1), weights.w_uk_HNC)
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
        heads_HRV = torch.bmm(latent_RHC.transpose(0, 1), weights.w_uv_HVC.transpose(1, 2))
        out_THV.index_copy_(0, plan.tokens_R, heads_HRV.transpose(0, 1))

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        h_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        self._norm.add_norm(x_TD, None, weight_D, eps, sum_TD=None, h_TD=h_TD)
        return h_TD

    def add_norm(self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_TD, h_TD = (torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) for _ in range(2))
        self._norm.add_norm(x_TD, update_TD, weight_D, eps, sum_TD=sum_TD, h_TD=h_TD)
        return sum_TD, h_TD

    def _num_programs(self, device: torch.device) -> int:
        if device.type == "cpu":
            return 1  # the interpreter runs one after the other
        return torch.cuda.get_device_properties(device).multi_processor_count - self._comm_sms


REFERENCE = ReferenceOps()
OPS: dict[str, Callable[..., AttentionOps]] = {"reference": ReferenceOps, "triton": TritonOps}


def attention_ops(name: str) -> AttentionOps:
    """The ops of that name. ValueError if they need a package that is not installed."""
    return OPS[name]()


def interpreted() -> bool:
    """Whether kernels would run in Triton's interpreter. ValueError if Triton is not installed."""
    return _import("e4m3_kernels").INTERPRETED


def _import(name: str) -> ModuleType:
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise ValueError(
            "ops is 'triton'; it needs the package triton: pip install 'serried[gpu]', or choose reference"
        ) from error
