"""Experts packed for oneDNN against one pair at a time in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe import ExpertBank, Mlp, MoeConfig
from moe.ops import moe_ops
from moe.packed import PackedBank, PackedMlp, PackedOnce
from moe.reference import random_weights, run_expert

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="no bf16 matmul of oneDNN here",
)
CONFIG = MoeConfig(
    hidden_size=40, intermediate_size=24, num_experts=7, top_k=2, scoring="softmax", method="greedy", routed_scaling=1.0
)


def bank_of(seed: int = 1) -> ExpertBank:
    return random_weights(CONFIG, seed=seed, dtype=torch.bfloat16).bank


def rows_of(num_rows: int) -> Tensor:
    return torch.randn(num_rows, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()


def pairs(num_pairs: int, num_rows: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(num_pairs)
    rows_M = torch.randint(0, num_rows, (num_pairs,), generator=noise)
    return rows_M, torch.randint(0, CONFIG.num_experts, (num_pairs,), generator=noise)


def exact(bank: ExpertBank, x_ND: Tensor, rows_M: Tensor, slots_M: Tensor) -> Tensor:
    wide = replace(bank, gate_up_L2FD=bank.gate_up_L2FD.double(), down_LDF=bank.down_LDF.double())
    each = zip(rows_M.tolist(), slots_M.tolist(), strict=True)
    return torch.cat([run_expert(x_ND[row : row + 1].double(), wide, slot) for row, slot in each])


def assert_rounded(found: Tensor, truth: Tensor) -> None:
    """Each row within what three roundings to 8 bits leave of it."""
    assert found.dtype == torch.bfloat16
    error_M = (found.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert float(error_M.max()) < 2**-6, f"row {int(error_M.argmax())} is off by {float(error_M.max()):.4f} of itself"


@pytest.mark.parametrize("num_pairs", [1, 2, 53])
def test_every_pair_gets_its_own_expert(num_pairs: int):
    bank, x_ND = bank_of(), rows_of(20)
    rows_M, slots_M = pairs(num_pairs, 20)
    assert_rounded(PackedBank(bank).apply(x_ND, rows_M, slots_M), exact(bank, x_ND, rows_M, slots_M))


def test_everything_may_go_to_one_expert():
    bank, x_ND = bank_of(), rows_of(33)
    rows_M, slots_M = torch.arange(33), torch.full((33,), 4)
    assert_rounded(PackedBank(bank).apply(x_ND, rows_M, slots_M), exact(bank, x_ND, rows_M, slots_M))


def test_no_pairs_give_no_rows():
    none = torch.empty(0, dtype=torch.int64)
    assert PackedBank(bank_of()).apply(rows_of(3), none, none).shape == (0, CONFIG.hidden_size)


def test_rows_may_lie_between_other_things():
    wide_NX = torch.full((20, CONFIG.hidden_size + 24), torch.nan).bfloat16()
    wide_NX[:, 16:-8] = rows_of(20)
    asked, bank = pairs(53, 20), PackedBank(bank_of())
    assert torch.equal(bank.apply(wide_NX[:, 16:-8], *asked), bank.apply(rows_of(20), *asked))


def test_a_slot_that_was_written_since_is_packed_anew_and_the_others_are_not():
    bank, other, x_ND = bank_of(), bank_of(seed=5), rows_of(14)
    packed, rows_M, slots_M = PackedBank(bank), torch.arange(14), torch.arange(14) % CONFIG.num_experts
    before = packed.apply(x_ND, rows_M, slots_M)
    bank.write_blob(3, other.blob(5))
    after = packed.apply(x_ND, rows_M, slots_M)
    assert_rounded(after, exact(bank, x_ND, rows_M, slots_M))
    assert torch.equal(before[slots_M != 3], after[slots_M != 3])
    assert not torch.equal(before[slots_M == 3], after[slots_M == 3])


def test_an_empty_slot_is_not_read():
    bank, x_ND = bank_of(), rows_of(9)
    bank.gate_up_L2FD[3] = torch.nan
    bank.down_LDF[3] = torch.nan
    rows_M, slots_M = torch.arange(9), torch.tensor([0, 1, 2, 4, 5, 6, 0, 1, 2])
    assert bool(PackedBank(bank).apply(x_ND, rows_M, slots_M).isfinite().all())


def test_an_mlp_of_its_own_is_the_only_slot_of_a_bank():
    bank, x_TD = bank_of(), rows_of(5)
    mlp = Mlp(gate_up_2FD=bank.gate_up_L2FD[2], down_DF=bank.down_LDF[2])
    truth = exact(bank, x_TD, torch.arange(5), torch.full((5,), 2))
    assert_rounded(PackedMlp(mlp)(x_TD), truth)
    assert_rounded(moe_ops("onednn").mlp(x_TD, mlp), truth)
    assert PackedMlp(mlp)(x_TD[:0]).shape == (0, CONFIG.hidden_size)


def test_what_is_packed_is_packed_once():
    once, bank = PackedOnce(), bank_of()
    assert once.bank(bank) is once.bank(bank)
    assert once.bank(bank_of()) is not once.bank(bank)


def test_other_formats_are_not_packed():
    mlp = Mlp(gate_up_2FD=torch.zeros(48, 40), down_DF=torch.zeros(40, 24))
    with pytest.raises(AssertionError, match="float32 where oneDNN packs bfloat16"):
        PackedMlp(mlp)
