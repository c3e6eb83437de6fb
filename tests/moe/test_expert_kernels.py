"""The experts' matmuls in Triton's interpreter against float64, one expert at a time."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe import ExpertBank, MoeConfig
from moe.expert_kernels import TILINGS, down, gate_up, tiling_for
from moe.pairs import PairGroups, group_pairs
from moe.quant import FP8, num_blocks, quantize_rows
from moe.reference import quantize_bank, random_weights, run_expert, run_fp8_expert
from tests.moe.closeness import assert_close_rows

pytestmark = pytest.mark.interpret
SMALL = TILINGS[16]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bank and rows for it."""

    dtype: torch.dtype = torch.bfloat16
    is_fp8: bool = False
    hidden: int = 72
    width: int = 40
    num_slots: int = 3

    @property
    def bank(self) -> ExpertBank:
        config = MoeConfig(
            hidden_size=self.hidden, intermediate_size=self.width, num_experts=self.num_slots, top_k=1,
            scoring="softmax", method="greedy",
        )  # fmt: skip
        bank = random_weights(config, seed=3, dtype=self.dtype).bank
        return quantize_bank(bank) if self.is_fp8 else bank

    def rows(self, num_rows: int) -> Tensor:
        noise = torch.Generator().manual_seed(5)
        return torch.randn(num_rows, self.hidden, generator=noise, dtype=torch.float64).to(self.dtype)

    def truth(self, x_ND: Tensor, bank: ExpertBank, slots_NK: Tensor) -> Tensor:
        """float64, in (row, top-k) order."""
        run = run_fp8_expert if self.is_fp8 else run_expert
        wide = (
            bank
            if self.is_fp8
            else ExpertBank(gate_up_L2FD=bank.gate_up_L2FD.double(), down_LDF=bank.down_LDF.double())
        )
        pairs = [(n, slot) for n, row in enumerate(slots_NK.tolist()) for slot in row if slot >= 0]
        rows = [run(x_ND[n : n + 1].double(), wide, slot) for n, slot in pairs]
        return torch.cat(rows) if rows else torch.empty(0, self.hidden, dtype=torch.float64)

    @property
    def most_cosine(self) -> float:
        return 1e-3 if self.is_fp8 else 1e-5


BF16, FP8_CASE = Case(), Case(is_fp8=True)
CASES = {
    "bf16": BF16,
    "fp16": Case(dtype=torch.float16),
    "fp32": Case(dtype=torch.float32),
    "fp8": FP8_CASE,
    "fp8, partial blocks": Case(is_fp8=True, hidden=200, width=136),
    "bf16, whole blocks": Case(hidden=128, width=128),
}


def compute(
    x_ND: Tensor, bank: ExpertBank, groups: PairGroups, *, rows: int = 16, num_programs: int = 2
) -> tuple[Tensor, Tensor]:
    """(activations [M, F], results [M, D]); memory is full of NaN before."""
    _, width, hidden = bank.down_LDF.shape
    dtype, is_fp8, num_places = x_ND.dtype, bank.scales is not None, groups.num_places
    act_MF = torch.full((num_places, hidden), torch.nan).to(FP8 if is_fp8 else dtype)
    y_MD = torch.full((num_places, width), torch.nan, dtype=dtype)
    cut = {"tiling": TILINGS[rows], "num_programs": num_programs}
    if not is_fp8:
        gate_up(x_ND, bank, groups, act_MF, **cut)
        down(act_MF, bank, groups, y_MD, **cut)
        return act_MF, y_MD
    q_ND, scale_Nd = quantize_rows(x_ND)
    act_scale_Mf = torch.full((num_places, num_blocks(hidden)), torch.nan)
    gate_up(q_ND, bank, groups, act_MF, x_scale_Nd=scale_Nd, act_scale_Mf=act_scale_Mf, **cut)
    down(act_MF, bank, groups, y_MD, act_scale_Mf=act_scale_Mf, **cut)
    return act_MF, y_MD


def grouped(slots_NK: Tensor, num_slots: int) -> PairGroups:
    groups = PairGroups.empty(*slots_NK.shape, num_slots, device="cpu")
    groups.rows_M.fill_(1 << 30)  # past the last pair nobody may look
    group_pairs(slots_NK, groups)
    return groups


def in_pair_order(y_MD: Tensor, groups: PairGroups) -> Tensor:
    return y_MD[groups.places_NK[groups.places_NK >= 0].long()]


def test_the_docstrings_expert_is_computed() -> None:
    bank = ExpertBank(gate_up_L2FD=torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), down_LDF=torch.tensor([[[1.0], [-1.0]]]))
    act_MF, y_MD = compute(torch.tensor([[2.0, 3.0]]), bank, grouped(torch.tensor([[0]]), 1))
    assert act_MF.item() == pytest.approx(5.2848, abs=1e-4)
    assert y_MD.tolist() == [[act_MF.item(), -act_MF.item()]]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_one_expert_at_a_time(name: str) -> None:
    """Slot 1 gets none; a slot gets more than a tile of rows, another less; some rows go nowhere."""
    case = CASES[name]
    noise = torch.Generator().manual_seed(1)
    slots_NK = torch.where(torch.rand(23, 2, generator=noise) < 0.5, 0, torch.tensor([2, -1]))
    x_ND, bank, groups = case.rows(23), case.bank, grouped(slots_NK, 3)
    for weights in (bank.gate_up_L2FD, bank.down_LDF):
        weights[1] = torch.nan  # an empty slot is not read
    _, y_MD = compute(x_ND, bank, groups)
    assert_close_rows(in_pair_order(y_MD, groups), case.truth(x_ND, bank, slots_NK), most_cosine=case.most_cosine)
    assert y_MD[int(groups.starts_L[-1]) :].isnan().all(), "a place without a pair was written"


@pytest.mark.parametrize("case", [BF16, FP8_CASE], ids=["bf16", "fp8"])
@pytest.mark.parametrize("slots", [[], [0], [-1], [2], [1] * 65], ids=["none", "one", "nowhere", "last", "all to one"])
def test_few_rows_and_rows_that_all_go_to_one_slot(case: Case, slots: list[int]) -> None:
    slots_NK = torch.tensor(slots, dtype=torch.int64).unsqueeze(1)
    x_ND, bank, groups = case.rows(len(slots)), case.bank, grouped(slots_NK, 3)
    _, y_MD = compute(x_ND, bank, groups, num_programs=1)
    assert_close_rows(in_pair_order(y_MD, groups), case.truth(x_ND, bank, slots_NK), most_cosine=case.most_cosine)


@pytest.mark.parametrize("case", [BF16, FP8_CASE], ids=["bf16", "fp8"])
def test_a_row_does_not_depend_on_its_mates_nor_on_how_work_is_cut(case: Case) -> None:
    slots_NK = torch.tensor([0, 0, 2] * 7).unsqueeze(1)
    x_ND, bank = case.rows(21), case.bank
    groups = grouped(slots_NK, 3)
    _, y_MD = compute(x_ND, bank, groups)
    together_MD = in_pair_order(y_MD, groups)
    for rows, num_programs in ((16, 5), (32, 1), (64, 2)):
        _, y_MD = compute(x_ND, bank, groups, rows=rows, num_programs=num_programs)
        assert torch.equal(in_pair_order(y_MD, groups), together_MD), f"tiles of {rows}, {num_programs} programs"
    for row in (0, 5, 20):
        _, alone_MD = compute(x_ND[row : row + 1], bank, grouped(slots_NK[row : row + 1], 3), num_programs=1)
        assert torch.equal(alone_MD[0], together_MD[row]), f"row {row} alone"


def test_rows_may_lie_between_other_fields() -> None:
    slots_NK = torch.tensor([[0], [2]])
    x_ND, bank, groups = BF16.rows(2), BF16.bank, grouped(torch.tensor([[0], [2]]), 3)
    wide_NX = torch.full((2, 3 * BF16.hidden), torch.nan, dtype=torch.bfloat16)
    wide_NX[:, BF16.hidden : 2 * BF16.hidden] = x_ND
    _, y_MD = compute(wide_NX[:, BF16.hidden : 2 * BF16.hidden], bank, groups)
    assert_close_rows(in_pair_order(y_MD, groups), BF16.truth(x_ND, bank, slots_NK), most_cosine=1e-5)


@pytest.mark.parametrize(("rows_per_slot", "rows"), [(0, 16), (16, 16), (16.5, 32), (40, 64), (5000, 64)])
def test_the_tile_holds_what_a_slot_gets(rows_per_slot: float, rows: int) -> None:
    assert tiling_for(rows_per_slot).rows == rows
