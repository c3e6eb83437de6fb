"""The cases of attention's kernels, see `kernel_case`: norm, append, attention with and without absorption, linears.

Letters: B requests, T tokens, S context, W latent width, D model, H heads, C latent rank, P rope dim, Q, G blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_mla import (
    CacheFormat,
    Fp8Matrix,
    Fp8Rows,
    LatentCache,
    MlaWeights,
    PagedView,
    PageTable,
    Spans,
    angles,
    attention_ops,
    mla_shapes,
    plain,
)
from attention_mla.ops import AttentionOps, Latents
from attention_mla.reference import Queries
from moe.quant import dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows

from ..costs.roofline import CostShape
from ..model.model_config import ModelConfig
from .kernel_case import CaseSize, KernelCase, Random

PAGE = 64


def _weights(model: ModelConfig, random: Random) -> MlaWeights:
    return MlaWeights.build(
        model.mla,
        {name: random(*shape, scale=shape[-1] ** -0.5) for name, shape in mla_shapes(model.mla).items()},
    )


def _view(size: CaseSize, device: torch.device) -> PagedView:
    """Every request decodes one token at the end of its context; pages lie in no order."""
    num_pages = -(-size.context // PAGE)
    table = PageTable(size.batch, num_pages, page_size=PAGE, device=device)
    order = np.random.default_rng(0).permutation(size.batch * num_pages)
    for slot in range(size.batch):
        table.write(slot, 0, order[slot * num_pages : (slot + 1) * num_pages].tolist())
    contexts = np.full(size.batch, size.context, dtype=np.int64)
    spans = Spans(
        slots_B=np.arange(size.batch), num_tokens_B=np.ones_like(contexts), context_B=contexts, written_B=contexts - 1
    )
    return PagedView.build(spans, table)


def attention_cases(model: ModelConfig, size: CaseSize, name: str, random: Random) -> Iterator[KernelCase]:
    mla, shape, tokens = model.mla, CostShape.of(model), size.batch
    x_TD, update_TD, norm_D = (
        random(tokens, model.hidden_size),
        random(tokens, model.hidden_size),
        random(model.hidden_size),
    )
    vector = x_TD.element_size() * model.hidden_size
    yield KernelCase(
        title=f"{name}: add and norm, {tokens} tokens",
        run=lambda ops: plain(attention_ops(ops).add_norm(x_TD, update_TD, norm_D, 1e-6)[1]),
        num_bytes=4.0 * tokens * vector,
    )
    view, weights = _view(size, x_TD.device), _weights(model, random)
    cache = LatentCache(1, size.batch * -(-size.context // PAGE), PAGE, CacheFormat.of(mla, x_TD.dtype), x_TD.device)
    cache.pages.copy_(random(*cache.pages.shape[1:]).unsqueeze(0))
    latents = Latents(latent_TC=random(tokens, mla.kv_lora_rank), rope_TP=random(tokens, mla.qk_rope_head_dim))
    queries = Queries(
        nope_THN=random(tokens, mla.num_heads, mla.qk_nope_head_dim),
        rope_THP=random(tokens, mla.num_heads, mla.qk_rope_head_dim),
    )
    where = {"config": mla, "cache": cache, "layer": 0, "view": view}
    rotation = angles(mla.rope, mla.qk_rope_head_dim, view.positions_T, x_TD.dtype)

    def append(ops: AttentionOps) -> Tensor:
        turned_THP = ops.append(latents, queries.rope_THP, weights.latent_norm_C, rotation=rotation, **where)
        return torch.cat((turned_THP.flatten(1), cache.rows(0).take(view.places_T)), dim=1)

    yield KernelCase(
        title=f"{name}: norm, turn, append, {tokens} tokens",
        run=lambda ops: append(attention_ops(ops)),
        num_bytes=x_TD.element_size() * 2.0 * tokens * (mla.latent_width + mla.num_heads * mla.qk_rope_head_dim),
    )

    def attend(ops: AttentionOps) -> Tensor:
        out_THV = queries.nope_THN.new_empty(tokens, mla.num_heads, mla.v_head_dim)
        plan = ops.plan(view, config=mla, dtype=x_TD.dtype)
        ops.attend(queries, weights, plan=plan, out_THV=out_THV, **where)
        return out_THV.flatten(1)

    pairs = float(tokens * size.context)
    yield KernelCase(
        title=f"{name}: attention with absorption, {mla.num_heads} heads, {tokens} x {size.context}",
        run=lambda ops: attend(attention_ops(ops)),
        flops=2 * shape.heads * (2 * shape.latent + shape.rope) * pairs + 2 * shape.absorbed * tokens,
        num_bytes=x_TD.element_size() * (mla.latent_width * pairs + shape.absorbed),
    )
    absorbed_THC = random(tokens, mla.num_heads, mla.kv_lora_rank)
    yield KernelCase(
        title=f"{name}: attention core, {mla.num_heads} heads, {tokens} x {size.context}",
        run=lambda ops: _core(ops, absorbed_THC, queries.rope_THP, **where),
        flops=2 * shape.heads * (2 * shape.latent + shape.rope) * pairs,
        num_bytes=x_TD.element_size() * mla.latent_width * pairs,
        is_core=mla.num_heads == 128,
    )
    if model.quantization is not None:
        for what, matrix in (("down", weights.down_XD), ("q_b", weights.q_b), ("o", weights.o_DU)):
            if matrix is not None:
                yield _linear_case(f"{name}: fp8 linear, {what}", plain(matrix), tokens, random)


def _core(
    ops: str, absorbed_THC: Tensor, rope_THP: Tensor, *, config: Any, cache: LatentCache, layer: int, view: PagedView
) -> Tensor:
    """Queries and latents only, without the matrices that are absorbed."""
    if ops == "reference":
        places_BS = torch.stack(
            [torch.from_numpy(view.table.places(slot, np.arange(end))) for slot, end in _ends(view)]
        )
        places_BS = places_BS.to(absorbed_THC.device)
        keys_BSW = torch.stack([cache.rows(layer).take(places_S) for places_S in places_BS])
        parts = [
            torch.softmax(
                config.softmax_scale * (torch.cat((absorbed, rope), dim=1).float() @ keys_SW.float().T), dim=1
            )
            @ keys_SW[:, : config.kv_lora_rank].float()
            for absorbed, rope, keys_SW in zip(absorbed_THC, rope_THP, keys_BSW, strict=True)
        ]
        return torch.stack(parts).flatten(1)
    decode, merge = _kernels("decode"), _kernels("merge")
    plan = attention_ops(ops).plan(view, config=config, dtype=absorbed_THC.dtype)
    out_THC = torch.empty_like(absorbed_THC)
    decode.attend(
        absorbed_THC,
        rope_THP,
        cache.rows(layer),
        requests=plan.requests,
        work=plan.work,
        page_size=cache.page_size,
        score_scale=config.softmax_scale,
        num_programs=_programs(absorbed_THC.device),
        scratch=plan.scratch,
        out_THC=out_THC,
    )
    merge.merge_splits(plan.scratch, requests=plan.requests, work=plan.work, out_THC=out_THC)
    return out_THC.flatten(1)


def _ends(view: PagedView) -> list[tuple[int, int]]:
    """(slot, context) of each span."""
    return list(zip(view.spans.slots_B.tolist(), view.spans.context_B.tolist(), strict=True))


def _kernels(name: str) -> Any:
    """A module that needs Triton, which not every machine has."""
    return import_module(f"attention_mla.{name}_kernels")


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _linear_case(title: str, weight_ND: Tensor, tokens: int, random: Random) -> KernelCase:
    """A projection as it is stored: e4m3 in blocks of 128 x 128, and activations with a scale for each 128 columns."""
    num_outputs, dim = weight_ND.shape
    weight, scales_QG = quantize_blocks(weight_ND.float())
    values_TD, x_scales_TG = quantize_rows(random(tokens, dim))
    rows = Fp8Rows(values_TD=values_TD, scales_TG=x_scales_TG, dtype=weight_ND.dtype)

    def run(ops: str) -> Tensor:
        if ops == "reference":
            wide = dequantize_rows(values_TD, x_scales_TG, torch.float32)
            return wide @ dequantize_blocks(weight, scales_QG, torch.float32).T
        return attention_ops(ops).linear(rows, Fp8Matrix(values_ND=weight, scales_QG=scales_QG))

    return KernelCase(
        title=f"{title}, {dim} to {num_outputs}, {tokens} tokens",
        run=run,
        flops=2.0 * tokens * num_outputs * dim,
        fast="fp8",
        num_bytes=float(weight.nbytes + values_TD.nbytes + 2 * tokens * num_outputs),
    )
