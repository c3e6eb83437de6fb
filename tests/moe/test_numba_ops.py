"""A MoE layer's parts in Numba's kernels: the router's decisions as in torch, experts against one pair at a time in
float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep import Arrivals
from ep.rows import RunCodec
from moe import ExpertBank, Mlp, MoeConfig, PlacementTable
from moe.cpu_kernels import group_pairs
from moe.numba_ops import PackedBank
from moe.ops import ReferenceOps, moe_ops
from moe.reference import random_weights, run_expert

CONFIG = MoeConfig(
    hidden_size=40, intermediate_size=24, num_experts=7, top_k=2, scoring="softmax", method="greedy", routed_scaling=1.0
)
V3 = MoeConfig(
    hidden_size=40,
    intermediate_size=24,
    num_experts=16,
    top_k=3,
    scoring="sigmoid",
    method="noaux_tc",
    num_groups=4,
    topk_groups=2,
    norm_topk_prob=True,
    routed_scaling=2.5,
)
V2 = replace(V3, scoring="softmax", method="group_limited_greedy", norm_topk_prob=False)
ALL_GROUPS = replace(V3, num_groups=1, topk_groups=1)


def bank_of(seed: int = 1) -> ExpertBank:
    return random_weights(CONFIG, seed=seed, dtype=torch.bfloat16).bank


def rows_of(num_rows: int, width: int = CONFIG.hidden_size) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(2)).bfloat16()


def slots_of(num_rows: int, top_k: int, num_slots: int) -> Tensor:
    return torch.randint(-1, num_slots, (num_rows, top_k), generator=torch.Generator().manual_seed(num_rows))


def computed(packed: PackedBank, x_ND: Tensor, slots_NK: Tensor) -> Tensor:
    """[N, K, D]; zeros where there is no pair."""
    grouped = group_pairs(slots_NK, packed.source.num_slots)
    y_MD = packed.apply(x_ND, grouped, int(grouped.starts_L[-1]))
    out = torch.zeros(*slots_NK.shape, x_ND.shape[1], dtype=torch.bfloat16)
    out[slots_NK >= 0] = y_MD[grouped.places_NK[slots_NK >= 0]]
    return out


def exact(bank: ExpertBank, x_ND: Tensor, slots_NK: Tensor) -> Tensor:
    wide = replace(bank, gate_up_L2FD=bank.gate_up_L2FD.double(), down_LDF=bank.down_LDF.double())
    out = torch.zeros(*slots_NK.shape, x_ND.shape[1], dtype=torch.float64)
    for row, k in (slots_NK >= 0).nonzero().tolist():
        out[row, k] = run_expert(x_ND[row : row + 1].double(), wide, int(slots_NK[row, k]))[0]
    return out


def assert_rounded(found: Tensor, truth: Tensor) -> None:
    """Each row within what three roundings to 8 bits leave of it."""
    assert found.dtype == torch.bfloat16
    error = (found.double() - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-9)
    assert float(error.max()) < 2**-6, f"off by {float(error.max()):.4f} of itself"


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("config", [CONFIG, V3, V2, ALL_GROUPS], ids=["greedy", "V3", "V2", "one group"])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 37])
def test_a_token_goes_where_torch_sends_it(config: MoeConfig, num_tokens: int, copies: int):
    weights, x_TD = random_weights(config, seed=1, dtype=torch.bfloat16), rows_of(num_tokens)
    slots = [[e + number * config.num_experts for number in range(1 + e % copies)] for e in range(config.num_experts)]
    given = {
        "table": PlacementTable.build(slots, device="cpu"),
        "rank": 3,
        "positions_T": torch.randint(-1, 9, (num_tokens,), generator=torch.Generator().manual_seed(1)),
    }
    asked = (x_TD, weights.gate_ED.float(), weights.bias_E, config)
    found, wanted = moe_ops("numba").route(*asked, **given), ReferenceOps().route(*asked, **given)
    assert torch.equal(found.slots_TK, wanted.slots_TK)
    assert torch.equal(found.experts_TK, wanted.experts_TK)
    assert torch.equal(found.counts_E, wanted.counts_E)
    torch.testing.assert_close(found.weights_TK, wanted.weights_TK, rtol=1e-5, atol=1e-6)


def test_equal_scores_go_to_the_lowest_experts():
    config = replace(V3, routed_scaling=1.0)
    table = PlacementTable.build([[e] for e in range(16)], device="cpu")
    x_TD, gate_ED = torch.zeros(2, 40).bfloat16(), torch.zeros(16, 40)
    bias_E = torch.zeros(16)
    bias_E[[9, 11]] = 1.0
    routed = moe_ops("numba").route(
        x_TD, gate_ED, bias_E, config, table=table, rank=0, positions_T=torch.zeros(2, dtype=torch.int64)
    )
    assert routed.experts_TK.tolist() == [[9, 11, 0]] * 2


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_every_pair_gets_its_own_expert(num_rows: int):
    bank, x_ND, slots_NK = bank_of(), rows_of(num_rows), slots_of(num_rows, 3, CONFIG.num_experts)
    assert_rounded(computed(PackedBank(bank), x_ND, slots_NK), exact(bank, x_ND, slots_NK))


def test_everything_may_go_to_one_expert():
    bank, x_ND, slots_NK = bank_of(), rows_of(33), torch.full((33, 1), 4)
    assert_rounded(computed(PackedBank(bank), x_ND, slots_NK), exact(bank, x_ND, slots_NK))


def test_no_pairs_give_no_rows():
    grouped = group_pairs(torch.full((3, 2), -1), CONFIG.num_experts)
    assert PackedBank(bank_of()).apply(rows_of(3), grouped, 0).shape == (0, CONFIG.hidden_size)
    assert int(group_pairs(torch.empty(0, 2, dtype=torch.int64), 5).starts_L[-1]) == 0


def test_pairs_are_sorted_by_slot_in_their_order():
    slots_NK = torch.tensor([[1, -1, 9], [0, 1, 9], [-1, -1, 9], [1, 0, 9]])[:, :2]
    starts_L, rows_M, places_NK = group_pairs(slots_NK, 3)
    assert starts_L.tolist() == [0, 2, 5, 5]
    assert rows_M[:5].tolist() == [1, 3, 0, 1, 3]
    assert places_NK.tolist() == [[2, -1], [0, 3], [-1, -1], [4, 1]]


def test_rows_may_lie_between_other_things():
    wide_NX = torch.full((20, CONFIG.hidden_size + 24), torch.nan).bfloat16()
    wide_NX[:, 16:-8] = rows_of(20)
    packed, slots_NK = PackedBank(bank_of()), slots_of(20, 3, CONFIG.num_experts)
    assert torch.equal(computed(packed, wide_NX[:, 16:-8], slots_NK), computed(packed, rows_of(20), slots_NK))


def test_a_row_has_the_same_bits_whoever_else_came():
    packed, x_ND, slots_NK = PackedBank(bank_of()), rows_of(40), slots_of(40, 2, CONFIG.num_experts)
    together = computed(packed, x_ND, slots_NK)
    for row in range(0, 40, 3):
        alone = computed(packed, x_ND[row : row + 1], slots_NK[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_a_slot_that_was_written_since_is_packed_anew_and_the_others_are_not():
    bank, other, x_ND = bank_of(), bank_of(seed=5), rows_of(14)
    packed, slots_NK = PackedBank(bank), (torch.arange(14) % CONFIG.num_experts).unsqueeze(1)
    before = computed(packed, x_ND, slots_NK)
    bank.write_blob(3, other.blob(5))
    after = computed(packed, x_ND, slots_NK)
    assert_rounded(after, exact(bank, x_ND, slots_NK))
    assert torch.equal(before[slots_NK != 3], after[slots_NK != 3])
    assert not torch.equal(before[slots_NK == 3], after[slots_NK == 3])
    bank.write_blob(3, bank_of().blob(3))
    assert torch.equal(computed(packed, x_ND, slots_NK), before)


def test_an_empty_slot_does_not_count():
    bank, x_ND = bank_of(), rows_of(9)
    bank.gate_up_L2FD[3] = torch.nan
    bank.down_LDF[3] = torch.nan
    slots_NK = torch.tensor([0, 1, 2, 4, 5, 6, 0, 1, 2]).unsqueeze(1)
    assert bool(computed(PackedBank(bank), x_ND, slots_NK).isfinite().all())


def test_an_mlp_of_its_own_is_the_only_slot_of_a_bank():
    bank, x_TD, ops = bank_of(), rows_of(5), moe_ops("numba")
    mlp = Mlp(gate_up_2FD=bank.gate_up_L2FD[2], down_DF=bank.down_LDF[2])
    assert_rounded(ops.mlp(x_TD, mlp), exact(bank, x_TD, torch.full((5, 1), 2))[:, 0])
    assert ops.mlp(x_TD[:0], mlp).shape == (0, CONFIG.hidden_size)


def test_what_is_packed_is_packed_once_and_not_taken_for_another():
    ops, x_TD = moe_ops("numba"), rows_of(5)
    banks = [bank_of(seed) for seed in (1, 2)]
    mlps = [Mlp(gate_up_2FD=bank.gate_up_L2FD[2], down_DF=bank.down_LDF[2]) for bank in banks]
    first = [ops.mlp(x_TD, mlp) for mlp in mlps]
    for mlp in mlps:
        mlp.gate_up_2FD.zero_()  # what is multiplied from now on is the copy
    assert all(torch.equal(ops.mlp(x_TD, mlp), before) for mlp, before in zip(mlps, first, strict=True))
    assert not torch.equal(*first)


def test_experts_fill_the_place_of_each_pair_that_arrived():
    bank, x_ND, slots_NK = bank_of(), rows_of(9), slots_of(9, 2, CONFIG.num_experts)
    codec = RunCodec(CONFIG.hidden_size, torch.bfloat16)
    weights_NK, source_N = torch.ones(9, 2), torch.zeros(9, dtype=torch.int64)
    arrivals = Arrivals(codec, codec.encode(x_ND, torch.bfloat16), slots_NK, weights_NK, source_N, None)  # type: ignore
    rows, num_pairs = moe_ops("numba").experts(arrivals, bank, rows_per_slot=1.0)
    assert num_pairs == int((slots_NK >= 0).sum()) == rows.rows_MD.shape[0]
    assert torch.equal(rows.index_NK >= 0, slots_NK >= 0)
    truth = exact(bank, x_ND, slots_NK)
    assert_rounded(rows.rows_MD[rows.index_NK[slots_NK >= 0]], truth[slots_NK >= 0])
