"""The cases of all kernels of one model, see `kernel_case`; those of attention are `attention_cases`'.

Knows the rooms' ops; does not know how they are timed.

Letters: T tokens, E experts, D model, K top-k, N rows received, L slots, P places, J rows that are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ep import Arrivals, exchange_ops, wide
from ep.rows import Fp8Codec, RowFormat, Rows
from ep.sums import Sums
from moe import ExpertBank, Fp8Scales, moe_ops, spread
from moe.quant import FP8, num_blocks

from ..costs.roofline import CostShape
from ..model.model_config import ModelConfig
from ..sampling.sampler_ops import sampler_ops
from .attention_cases import attention_cases
from .kernel_case import CaseSize, KernelCase, Random, random_values


def kernel_cases(
    model: ModelConfig, size: CaseSize, *, name: str, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """The cases of one model, one after the other: each holds its inputs only as long as it is used."""
    dice = torch.Generator(device).manual_seed(0)
    random = partial(random_values, dice=dice, dtype=dtype)
    yield from attention_cases(model, size, name, random)
    if model.moe is not None:
        yield from _moe_cases(model, size, name, random)
        yield from _exchange_cases(model, size, name, random)
    yield _sampler_case(model, size, name, random)


def _bank(model: ModelConfig, slots: int, random: Random) -> ExpertBank:
    """Experts of one rank, in fp8 where the checkpoint has them so."""
    moe = model.moe
    assert moe is not None
    hidden, inter = moe.hidden_size, moe.intermediate_size
    if model.quantization is None:
        return ExpertBank(
            gate_up_L2FD=random(slots, 2 * inter, hidden, scale=hidden**-0.5),
            down_LDF=random(slots, hidden, inter, scale=inter**-0.5),
        )
    scales = Fp8Scales(
        gate_up_L2fd=random(slots, 2, num_blocks(inter), num_blocks(hidden), as_dtype=torch.float32).abs() * 0.01
        + 0.01,
        down_Ldf=random(slots, num_blocks(hidden), num_blocks(inter), as_dtype=torch.float32).abs() * 0.01 + 0.01,
    )
    return ExpertBank(
        gate_up_L2FD=torch.stack([random(2 * inter, hidden).to(FP8) for _ in range(slots)]),
        down_LDF=torch.stack([random(hidden, inter).to(FP8) for _ in range(slots)]),
        scales=scales,
    )


def _arrivals(model: ModelConfig, size: CaseSize, slots: int, random: Random) -> Arrivals:
    """As many rows as reach one rank under level routing, each with one slot here, without padding; as they travel."""
    moe = model.moe
    assert moe is not None
    num_rows = max(size.batch * moe.top_k, 1) if size.ranks > 1 else size.batch
    x_ND = random(num_rows, moe.hidden_size)
    codec = Fp8Codec(moe.hidden_size, x_ND.dtype)
    word = RowFormat(moe.top_k, wide(x_ND.dtype), codec.value_bytes).word
    per_row = 1 if size.ranks > 1 else moe.top_k
    slots_NK = torch.full((num_rows, moe.top_k), -1, dtype=torch.int64, device=x_ND.device)
    for place in range(per_row):
        slots_NK[:, place] = (torch.arange(num_rows, device=x_ND.device) + place) % slots
    return Arrivals(
        codec=codec,
        values_NX=codec.encode(x_ND, word),
        slots_NK=slots_NK,
        weights_NK=torch.ones(num_rows, moe.top_k, device=x_ND.device),
        source_N=torch.zeros(num_rows, dtype=torch.int64, device=x_ND.device),
        handle=None,  # type: ignore[arg-type]  # for the combine only, which is not run
    )


def _moe_cases(model: ModelConfig, size: CaseSize, name: str, random: Random) -> Iterator[KernelCase]:
    moe, shape, tokens = model.moe, CostShape.of(model), size.batch
    assert moe is not None
    x_TD = random(tokens, moe.hidden_size)
    gate_ED = random(moe.num_experts, moe.hidden_size, scale=moe.hidden_size**-0.5, as_dtype=wide(x_TD.dtype))
    bias_E = random(moe.num_experts, scale=0.01, as_dtype=wide(x_TD.dtype)) if moe.has_bias else None
    table = spread(moe.num_experts, 1).table(x_TD.device)
    positions_T = torch.arange(tokens, device=x_TD.device)

    def route(ops: str) -> Tensor:
        routed = moe_ops(ops).route(x_TD, gate_ED, bias_E, moe, table=table, rank=0, positions_T=positions_T)
        weights_TE = torch.zeros(tokens, moe.num_experts, device=x_TD.device)
        return weights_TE.scatter_(1, routed.experts_TK, routed.weights_TK.float())

    yield KernelCase(
        title=f"{name}: router, {tokens} tokens",
        run=route,
        flops=2.0 * moe.hidden_size * moe.num_experts * tokens,
        num_bytes=4.0 * moe.hidden_size * moe.num_experts + x_TD.nbytes,
        bound=0.05,
    )
    slots = -(-moe.num_experts // size.ranks)
    bank, arrivals = _bank(model, slots, random), _arrivals(model, size, slots, random)
    num_pairs = int((arrivals.slots_NK >= 0).sum())
    rows_per_slot = num_pairs / slots

    def experts(ops: str) -> Tensor:
        computed = moe_ops(ops).experts(arrivals, bank, rows_per_slot=rows_per_slot)
        return computed.rows.rows_MD[computed.rows.index_NK[arrivals.slots_NK >= 0]]

    yield KernelCase(
        title=f"{name}: {slots} experts (EP{size.ranks}), {num_pairs} rows",
        run=experts,
        flops=2.0 * num_pairs * shape.expert,
        fast="fp8" if shape.fp8 else "bf16",
        num_bytes=slots * shape.expert * (1.0 if shape.fp8 else 2.0),
        slots=slots,
        bound=0.1 if shape.fp8 else 0.02,
    )


def _exchange_cases(model: ModelConfig, size: CaseSize, name: str, random: Random) -> Iterator[KernelCase]:
    moe, tokens = model.moe, size.batch
    assert moe is not None
    x_TD = random(tokens, moe.hidden_size)
    codec = Fp8Codec(moe.hidden_size, x_TD.dtype)
    row = RowFormat(moe.top_k, wide(x_TD.dtype), codec.value_bytes)
    slots_TK = torch.stack(
        [
            torch.randperm(moe.num_experts, generator=torch.Generator().manual_seed(t))[: moe.top_k]
            for t in range(tokens)
        ]
    ).to(x_TD.device)
    weights_TK = torch.ones(tokens, moe.top_k, device=x_TD.device)
    origin_T = torch.zeros(tokens, dtype=torch.int64, device=x_TD.device)
    members, per_member = size.ranks, -(-moe.num_experts // size.ranks)

    def pack(ops: str) -> Tensor:
        parts = exchange_ops(ops)
        places = parts.find_places(slots_TK, slots_per_member=per_member, num_members=members, capacity=tokens)
        packed_PB = torch.zeros(places.rows_P.shape[0], row.num_bytes, dtype=torch.uint8, device=x_TD.device)
        rows = Rows(origin_T, slots_TK, weights_TK, parts.encode(codec, x_TD, row.word))
        parts.pack(row, rows, places.rows_P, packed_PB)
        fields = row.fields(packed_PB)
        there_P = (fields.slots_NK >= 0).any(dim=1)
        return codec.decode(fields.values_NX).where(there_P.unsqueeze(1), 0).float()

    sent = tokens * min(moe.top_k, members)
    yield KernelCase(
        title=f"{name}: quantise and pack for EP{size.ranks}, {tokens} tokens",
        run=pack,
        num_bytes=float(x_TD.nbytes + sent * row.num_bytes),
        bound=0.08,
    )
    rows_MD = random(tokens * moe.top_k, moe.hidden_size)
    index_TJ = torch.arange(tokens * moe.top_k, device=x_TD.device).view(tokens, moe.top_k)

    def add(ops: str) -> Tensor:
        out_TD = torch.empty_like(x_TD)
        exchange_ops(ops).add(Sums(rows_MD, index_TJ), out_TD)
        return out_TD

    yield KernelCase(
        title=f"{name}: add rows up, {tokens} tokens of {moe.top_k}",
        run=add,
        num_bytes=float(rows_MD.nbytes + x_TD.nbytes),
    )


def _sampler_case(model: ModelConfig, size: CaseSize, name: str, random: Random) -> KernelCase:
    logits_BV = random(size.batch, model.vocab_size, as_dtype=torch.float32)
    tokens_SH = torch.zeros(size.batch, 1, dtype=torch.int64, device=logits_BV.device)

    def choose(ops: str) -> Tensor:
        return sampler_ops(ops).choose(logits_BV, {}, tokens_SH).token_B.unsqueeze(1).double()

    return KernelCase(
        title=f"{name}: greedy choice of {model.vocab_size} tokens, {size.batch} rows",
        run=choose,
        num_bytes=float(logits_BV.nbytes),
        bound=0.0,
    )
