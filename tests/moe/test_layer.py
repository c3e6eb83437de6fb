"""A layer on any number of ranks against the dense reference and against transformers."""

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dbo import drive
from ep import Arrivals, Exchange, ExchangeConfig, Terms, run_ranks
from moe import (
    ExpertPlacement,
    MoeConfig,
    MoeLayer,
    MoeOutput,
    MoeWeights,
    expert_shapes,
    router_shapes,
    shared_shapes,
    spread,
)
from moe.experts import ExpertBank
from moe.ops import Computed, ReferenceOps
from moe.reference import dense_moe, quantize_bank, random_weights, route_by_loop, take_slots

V3 = MoeConfig(
    hidden_size=24,
    intermediate_size=16,
    num_experts=16,
    top_k=4,
    num_shared=1,
    scoring="sigmoid",
    method="noaux_tc",
    num_groups=4,
    topk_groups=2,
    norm_topk_prob=True,
    routed_scaling=2.5,
)
V2 = replace(
    V3, scoring="softmax", method="group_limited_greedy", norm_topk_prob=False, routed_scaling=16.0, num_shared=2
)
LITE = replace(V2, method="greedy", routed_scaling=1.0, num_shared=0, top_k=16)
CONFIGS = {"v3": V3, "v2": V2, "all experts, none shared": LITE}
Combine = Literal["ranks", "slots"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One layer on some ranks. Rank r's tokens come from seed r, so that anybody knows everybody's answer."""

    config: MoeConfig
    weights: MoeWeights
    placement: ExpertPlacement
    tokens: Sequence[int]
    combine: Combine = "ranks"
    round_tokens: int = 1024
    num_tracks: int = 1

    def x_TD(self, rank: int, track: int = 0) -> Tensor:
        noise = torch.Generator().manual_seed(100 * track + rank)
        x_TD = torch.randn(self.tokens[rank], self.config.hidden_size, generator=noise, dtype=torch.float64)
        return x_TD.to(self.weights.gate_ED.dtype)

    def positions_T(self, rank: int) -> Tensor:
        return torch.arange(self.tokens[rank]) + 10 * rank

    def expected(self, rank: int, track: int = 0) -> Tensor:
        return dense_moe(self.x_TD(rank, track), self.weights, self.config)

    def layer(self, transport: Any) -> MoeLayer:
        placement, config = self.placement, self.config
        exchange = Exchange(
            transport,
            num_slots=placement.num_slots,
            hidden=config.hidden_size,
            top_k=config.top_k,
            dtype=self.weights.gate_ED.dtype,
            device=torch.device("cpu"),
            config=ExchangeConfig(
                exchange="exact", hierarchical="off", combine=self.combine, round_tokens=self.round_tokens
            ),
            num_tracks=self.num_tracks,
        )
        held = take_slots(self.weights.bank, placement.experts_of(transport.rank))
        weights = replace(self.weights, bank=held)
        return MoeLayer(config, weights, exchange=exchange, table=placement.table(), rank=transport.rank)

    def outputs(self) -> list[list[MoeOutput]]:
        """What each rank gets for each track."""

        def on_rank(transport: Any) -> list[MoeOutput]:
            with torch.inference_mode():
                layer = self.layer(transport)
                return drive([self.stages(layer, transport.rank, track) for track in range(self.num_tracks)])

        return run_ranks(self.placement.num_ranks, on_rank, timeout_s=60)

    def stages(self, layer: MoeLayer, rank: int, track: int) -> Generator[Any, Any, MoeOutput]:
        return layer.stages(
            self.x_TD(rank, track),
            step=0,
            layer=3,
            track=track,
            terms=Terms(bucket=max(self.tokens)),
            positions_T=self.positions_T(rank),
        )


def weights_of(config: MoeConfig, dtype: torch.dtype = torch.float64) -> MoeWeights:
    return random_weights(config, seed=7, dtype=dtype)


def uneven(num_ranks: int) -> list[int]:
    """Different for every rank, some idle: 5, 0, 3, 8, 1, 6, 4, 2, 7, 5, ..."""
    return [(5 + 4 * rank) % 9 for rank in range(num_ranks)]


@pytest.mark.parametrize("combine", ["ranks", "slots"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_any_number_of_ranks_is_the_dense_layer(config: MoeConfig, num_ranks: int, combine: Combine) -> None:
    placement = spread(config.num_experts, num_ranks)
    run = Run(config=config, weights=weights_of(config), placement=placement, tokens=uneven(num_ranks), combine=combine)
    counts_E = torch.zeros(config.num_experts, dtype=torch.int64)
    for rank, [output] in enumerate(run.outputs()):
        assert output.out_TD.dtype == torch.float64
        assert_close(output.out_TD, run.expected(rank), rtol=1e-12, atol=1e-12)
        counts_E += output.counts_E
    assert counts_E.sum() == sum(run.tokens) * config.top_k


@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_copies_of_experts_change_nothing(combine: Combine) -> None:
    """Every expert twice, expert 0 five times, on three ranks; rank 1 holds two copies of expert 3."""
    slots = [*range(16), 3, *range(16), 0, 0, 0, -1, -1]
    slots[13], slots[16] = slots[16], slots[13]
    placement = ExpertPlacement(num_ranks=3, slots_per_rank=13, slot_experts=(*slots, -1))
    run = Run(config=V3, weights=weights_of(V3), placement=placement, tokens=[40, 0, 23], combine=combine)
    for rank, [output] in enumerate(run.outputs()):
        assert_close(output.out_TD, run.expected(rank), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("combine", ["ranks", "slots"])
@pytest.mark.parametrize("round_tokens", [1, 7, 17, 32, 33])  # of a bucket of 33: 33, 5, 2, 2 and 1 rounds
def test_the_size_of_a_round_changes_nothing(round_tokens: int, combine: Combine) -> None:
    run = Run(
        config=V3,
        weights=weights_of(V3),
        placement=spread(16, 3),
        tokens=[14, 33, 0],
        round_tokens=round_tokens,
        combine=combine,
    )
    for rank, [output] in enumerate(run.outputs()):
        assert_close(output.out_TD, run.expected(rank), rtol=1e-12, atol=1e-12)
        assert output.counts_E.sum() == run.tokens[rank] * V3.top_k


def test_two_tracks_are_two_layers() -> None:
    run = Run(config=V3, weights=weights_of(V3), placement=spread(16, 4), tokens=[6, 1, 0, 9], num_tracks=2)
    for rank, outputs in enumerate(run.outputs()):
        for track, output in enumerate(outputs):
            assert_close(output.out_TD, run.expected(rank, track), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_everything_goes_to_one_expert(combine: Combine) -> None:
    config = replace(V3, top_k=1, num_groups=1, topk_groups=1)
    weights = replace(weights_of(config), bias_E=100.0 * (torch.arange(16) == 5))
    run = Run(config=config, weights=weights, placement=spread(16, 5), tokens=[9, 2, 0, 30, 4], combine=combine)
    for rank, [output] in enumerate(run.outputs()):
        assert_close(output.out_TD, run.expected(rank), rtol=1e-12, atol=1e-12)
        assert output.counts_E.tolist() == [run.tokens[rank] if expert == 5 else 0 for expert in range(16)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_slots_mode_not_one_bit_depends_on_where_experts_sit(dtype: torch.dtype) -> None:
    """Each expert gets the same rows in the same order, whoever holds it. Slots start at multiples of 64 bytes."""
    config = replace(V3, hidden_size=57, intermediate_size=32)
    backwards = ExpertPlacement(num_ranks=4, slots_per_rank=5, slot_experts=(*range(15, -1, -1), -1, -1, -1, -1))
    placements = [spread(16, 4), backwards]
    runs = [
        Run(config=config, weights=weights_of(config, dtype), placement=p, tokens=[50, 7, 0, 19], combine="slots")
        for p in placements
    ]
    for [here], [there] in zip(runs[0].outputs(), runs[1].outputs(), strict=True):
        assert torch.equal(here.out_TD, there.out_TD)


def test_nobody_has_a_token() -> None:
    run = Run(config=V3, weights=weights_of(V3), placement=spread(16, 3), tokens=[0, 0, 0])
    for [output] in run.outputs():
        assert output.out_TD.shape == (0, V3.hidden_size)
        assert output.counts_E.tolist() == [0] * 16


@dataclass(frozen=True, kw_only=True)
class PaddedRun(Run):
    """Every third row is padding, with numbers in it that would show."""

    def positions_T(self, rank: int) -> Tensor:
        return super().positions_T(rank).masked_fill(self.is_padded_T(rank), -1)

    def x_TD(self, rank: int, track: int = 0) -> Tensor:
        return super().x_TD(rank, track) * (1 + 99 * self.is_padded_T(rank).unsqueeze(1))

    def is_padded_T(self, rank: int) -> Tensor:
        return torch.arange(self.tokens[rank]) % 3 == 1


@pytest.mark.parametrize("combine", ["ranks", "slots"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_padded_row_gets_the_shared_expert_alone_and_is_not_counted(config: MoeConfig, combine: Combine) -> None:
    weights = weights_of(config)
    run = PaddedRun(config=config, weights=weights, placement=spread(16, 2), tokens=[8, 5], combine=combine)
    for rank, [output] in enumerate(run.outputs()):
        x_TD, is_padded_T = run.x_TD(rank), run.is_padded_T(rank)
        alone_TD = weights.shared(x_TD) if weights.shared else torch.zeros_like(x_TD)
        expected_TD = torch.where(is_padded_T.unsqueeze(1), alone_TD, run.expected(rank))
        assert_close(output.out_TD, expected_TD, rtol=1e-12, atol=1e-11)
        assert output.counts_E.sum() == (~is_padded_T).sum() * config.top_k


def test_counts_are_those_of_the_experts_not_of_the_slots() -> None:
    weights = weights_of(V3)
    run = Run(config=V3, weights=weights, placement=spread(16, 5), tokens=[9, 2, 0, 4, 4])
    for rank, [output] in enumerate(run.outputs()):
        experts_TK = route_by_loop(run.x_TD(rank), weights.gate_ED, weights.bias_E, V3).experts_TK
        assert output.counts_E.tolist() == [(experts_TK == expert).sum().item() for expert in range(16)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_bank_kept_in_fp8_is_the_dense_layer_of_its_dequantised_weights(num_ranks: int) -> None:
    """200 and 96 are no multiples of 128: the last blocks of D, and all of F, are partial."""
    config = replace(V3, hidden_size=200, intermediate_size=96)
    weights = weights_of(config)
    weights = replace(weights, bank=quantize_bank(weights.bank))
    run = Run(config=config, weights=weights, placement=spread(16, num_ranks), tokens=uneven(num_ranks))
    for rank, [output] in enumerate(run.outputs()):
        assert_close(output.out_TD, run.expected(rank), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_a_narrow_run_stays_near_the_dense_layer_in_its_own_dtype(dtype: torch.dtype, combine: Combine) -> None:
    run = Run(config=V3, weights=weights_of(V3, dtype), placement=spread(16, 3), tokens=[8, 0, 3], combine=combine)
    for rank, [output] in enumerate(run.outputs()):
        assert output.out_TD.dtype == dtype
        tolerance = 4 * torch.finfo(dtype).eps
        assert_close(output.out_TD, run.expected(rank), rtol=tolerance, atol=4 * tolerance)


def oracle_layer(config: MoeConfig) -> torch.nn.Module:
    fields = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_attention_heads": 4,
        "num_experts_per_tok": config.top_k,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared,
        "n_group": config.num_groups,
        "topk_group": config.topk_groups,
        "routed_scaling_factor": config.routed_scaling,
    }
    if config.scoring == "softmax":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

        settings = v2.DeepseekV2Config(**fields, topk_method=config.method)
        settings._experts_implementation = "eager"
        return v2.DeepseekV2Moe(settings)
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    settings = v3.DeepseekV3Config(**fields, norm_topk_prob=config.norm_topk_prob)
    settings._experts_implementation = "eager"
    return v3.DeepseekV3MoE(settings)


@pytest.mark.parametrize("config", [V3, V2], ids=["v3", "v2"])
def test_the_layer_is_that_of_transformers(config: MoeConfig) -> None:
    weights = weights_of(config, torch.float32)
    assert weights.shared is not None
    gate_FD, up_FD = weights.shared.gate_up_2FD.chunk(2)
    state = {
        "gate.weight": weights.gate_ED,
        "experts.gate_up_proj": weights.bank.gate_up_L2FD,
        "experts.down_proj": weights.bank.down_LDF,
        "shared_experts.gate_proj.weight": gate_FD,
        "shared_experts.up_proj.weight": up_FD,
        "shared_experts.down_proj.weight": weights.shared.down_DF,
    }
    if weights.bias_E is not None:
        state["gate.e_score_correction_bias"] = weights.bias_E
    oracle = oracle_layer(config)
    oracle.load_state_dict(state)
    run = Run(config=config, weights=weights, placement=spread(16, 3), tokens=[11, 0, 30])
    for rank, [output] in enumerate(run.outputs()):
        with torch.inference_mode():
            expected_TD = oracle(run.x_TD(rank).unsqueeze(0)).squeeze(0)
        assert_close(output.out_TD, expected_TD, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [V3, V2], ids=["v3", "v2"])
def test_names_and_shapes_are_those_of_transformers(config: MoeConfig) -> None:
    """Its experts are stacked in memory; one of them is what a checkpoint holds under experts.{j}."""
    expected = {name: tuple(value.shape) for name, value in oracle_layer(config).state_dict().items()}
    stacked = expected.pop("experts.gate_up_proj"), expected.pop("experts.down_proj")
    assert router_shapes(config) | shared_shapes(config) == expected
    one = expert_shapes(config)
    width, hidden = one["gate_proj.weight"]
    assert one["up_proj.weight"] == (width, hidden)
    assert stacked == ((16, 2 * width, hidden), (16, *one["down_proj.weight"]))


def test_a_model_without_shared_experts_has_no_names_for_them() -> None:
    assert shared_shapes(LITE) == {}


def test_a_bias_comes_with_noaux_tc_and_only_with_it() -> None:
    run = Run(config=V3, weights=replace(weights_of(V3), bias_E=None), placement=spread(16, 1), tokens=[1])
    with pytest.raises(AssertionError, match="method noaux_tc, bias None"):
        run.outputs()


def test_a_placement_of_another_number_of_experts_is_refused() -> None:
    run = Run(config=V3, weights=weights_of(V3), placement=spread(15, 3), tokens=[1, 1, 1])
    with pytest.raises(AssertionError, match="placement of 15, E 16"):
        run.outputs()


class Watched(ReferenceOps):
    """Ops that know what of the results of each round somebody still has."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def experts(self, arrivals: Arrivals, bank: ExpertBank, *, rows_per_slot: float) -> Computed:
        computed = super().experts(arrivals, bank, rows_per_slot=rows_per_slot)
        self.made.append(weakref.ref(computed.rows.rows_MD))
        return computed


def test_what_experts_made_is_let_go_before_anybody_waits_for_what_returns():
    weights = weights_of(V3)
    run = Run(config=V3, weights=weights, placement=spread(16, 2), tokens=[9, 9], round_tokens=5)

    def on_rank(transport: Any) -> list[bool]:
        layer, ops = run.layer(transport), Watched()
        layer._ops = ops
        stages, held = run.stages(layer, transport.rank, 0), []
        pending = next(stages)
        try:
            while True:
                held.append(any(made() is not None for made in ops.made))
                pending = stages.send(pending.wait())
        except StopIteration:
            return held

    assert run_ranks(2, on_rank, timeout_s=60) == [[False] * 4] * 2
