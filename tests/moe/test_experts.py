"""The bank against one pair at a time."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from moe import ExpertBank, Fp8Scales, MoeConfig
from moe.quant import dequantize_blocks
from moe.reference import quantize_bank, random_weights, run_expert, take_slots

CONFIG = MoeConfig(
    hidden_size=40, intermediate_size=24, num_experts=7, top_k=2, scoring="softmax", method="greedy", routed_scaling=1.0
)


def bank_of(config: MoeConfig = CONFIG, dtype: torch.dtype = torch.float64) -> ExpertBank:
    return random_weights(config, seed=1, dtype=dtype).bank


def rows_of(num_rows: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    noise = torch.Generator().manual_seed(2)
    return torch.randn(num_rows, CONFIG.hidden_size, generator=noise, dtype=torch.float64).to(dtype)


def pairs(num_pairs: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(num_pairs)
    rows_M = torch.randint(0, num_rows, (num_pairs,), generator=noise)
    return rows_M, torch.randint(0, CONFIG.num_experts, (num_pairs,), generator=noise)


def one_by_one(bank: ExpertBank, x_ND: torch.Tensor, rows_M: torch.Tensor, slots_M: torch.Tensor) -> torch.Tensor:
    ys = [run_expert(x_ND[row : row + 1], bank, int(slot)) for row, slot in zip(rows_M, slots_M, strict=True)]
    return torch.cat(ys)


@pytest.mark.parametrize("num_pairs", [1, 2, 53])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_bank_is_one_pair_at_a_time(num_pairs: int, dtype: torch.dtype, tolerance: float) -> None:
    bank, x_ND = bank_of(dtype=dtype), rows_of(20, dtype)
    rows_M, slots_M = pairs(num_pairs, 20)
    y_MD = bank.apply(x_ND, rows_M, slots_M)
    assert y_MD.dtype == dtype
    assert_close(y_MD, one_by_one(bank, x_ND, rows_M, slots_M), rtol=tolerance, atol=tolerance)


def test_no_pairs_give_no_rows() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert bank_of().apply(rows_of(0), none, none).shape == (0, CONFIG.hidden_size)
    assert bank_of().apply(rows_of(3), none, none).shape == (0, CONFIG.hidden_size)


def test_everything_to_one_slot_is_one_dense_layer() -> None:
    bank, x_ND = bank_of(), rows_of(33)
    y_MD = bank.apply(x_ND, torch.arange(33), torch.full((33,), 4))
    assert_close(y_MD, run_expert(x_ND, bank, 4), rtol=1e-12, atol=1e-12)


def test_the_rows_that_arrived_are_left_as_they_were() -> None:
    x_ND = rows_of(20)
    before = x_ND.clone()
    bank_of().apply(x_ND, *pairs(53, 20))
    assert torch.equal(x_ND, before)


def test_the_weights_of_a_slot_nobody_asked_for_are_not_read() -> None:
    bank, x_ND = bank_of(), rows_of(9)
    bank.gate_up_L2FD[3] = torch.nan
    bank.down_LDF[3] = torch.nan
    rows_M, slots_M = pairs(30, 9)
    assert bank.apply(x_ND, rows_M[slots_M != 3], slots_M[slots_M != 3]).isfinite().all()


@pytest.mark.parametrize(("hidden", "width"), [(128, 128), (200, 96), (130, 257)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_fp8_bank_equals_the_bank_of_its_dequantised_weights(hidden: int, width: int, dtype: torch.dtype) -> None:
    config = replace(CONFIG, hidden_size=hidden, intermediate_size=width, num_experts=3)
    bank = quantize_bank(bank_of(config))
    assert bank.scales is not None
    gate_FD, up_FD = bank.gate_up_L2FD.split(width, dim=1)
    plain = ExpertBank(
        gate_up_L2FD=torch.cat(
            [
                dequantize_blocks(gate_FD, bank.scales.gate_up_L2fd[:, 0], dtype),
                dequantize_blocks(up_FD, bank.scales.gate_up_L2fd[:, 1], dtype),
            ],
            dim=1,
        ),
        down_LDF=dequantize_blocks(bank.down_LDF, bank.scales.down_Ldf, dtype),
    )
    x_ND = torch.randn(6, hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    rows_M, slots_M = torch.tensor([5, 0, 3, 3, 2]), torch.tensor([2, 0, 2, 1, 0])
    for slot in range(3):
        for fp8, dequantised in zip(bank.slot_weights(slot, dtype), plain.slot_weights(slot, dtype), strict=True):
            assert torch.equal(fp8, dequantised)
    tolerance = 8 * torch.finfo(dtype).eps
    y_MD, expected = bank.apply(x_ND, rows_M, slots_M), plain.apply(x_ND, rows_M, slots_M)
    assert_close(y_MD, expected, rtol=tolerance, atol=tolerance)
    exact = bank_of(config, dtype).apply(x_ND, rows_M, slots_M)
    assert (bank.apply(x_ND, rows_M, slots_M) - exact).norm() < 0.1 * exact.norm()


def test_scales_come_with_fp8_and_only_with_fp8() -> None:
    bank = bank_of()
    scales = Fp8Scales(gate_up_L2fd=torch.ones(7, 2, 1, 1), down_Ldf=torch.ones(7, 1, 1))
    with pytest.raises(AssertionError, match=r"float64 bank, scales True"):
        replace(bank, scales=scales)
    with pytest.raises(AssertionError, match=r"float8_e4m3fn bank, scales False"):
        replace(quantize_bank(bank), scales=None)


def test_gate_up_and_down_must_be_of_one_shape() -> None:
    bank = bank_of()
    with pytest.raises(AssertionError, match=r"down \(7, 40, 20\), gate_up wants \(7, 40, 24\)"):
        replace(bank, down_LDF=bank.down_LDF[:, :, :20])


def test_a_ranks_bank_is_cut_out_of_the_whole() -> None:
    whole = bank_of()
    part = take_slots(whole, [6, -1, 2])
    assert torch.equal(part.gate_up_L2FD[[0, 2]], whole.gate_up_L2FD[[6, 2]])
    assert torch.equal(part.down_LDF[[0, 2]], whole.down_LDF[[6, 2]])
