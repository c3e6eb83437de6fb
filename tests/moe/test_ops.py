"""A layer whose work is done by kernels, in Triton's interpreter, against the same in torch and in float64."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbo import drive
from ep import Exchange, ExchangeConfig, Terms, exchange_ops, run_ranks
from moe import Mlp, MoeConfig, MoeLayer, MoeOutput, MoeWeights, spread
from moe.experts import gated_mlp
from moe.ops import OPS, moe_ops
from moe.reference import dense_moe, quantize_bank, random_weights, run_fp8_expert, take_slots
from tests.moe.closeness import assert_close_rows

CONFIG = MoeConfig(
    hidden_size=72, intermediate_size=40, num_experts=6, top_k=2, num_shared=1, scoring="sigmoid", method="noaux_tc",
    num_groups=3, topk_groups=2, norm_topk_prob=True, routed_scaling=2.5,
)  # fmt: skip
POSITIONS = [[3, 9, -1, 4, 0], [1], []]
"""Of each rank's tokens; one is padding."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One layer on three ranks, one of them idle, with two more copies of experts."""

    ops: str
    dtype: torch.dtype = torch.bfloat16
    is_fp8: bool = False
    exchange: str = "bounded"
    dispatch_dtype: str = "run"

    @property
    def weights(self) -> MoeWeights:
        weights = random_weights(CONFIG, seed=1, dtype=self.dtype)
        wide = replace(weights, gate_ED=weights.gate_ED.float())
        return replace(wide, bank=quantize_bank(wide.bank)) if self.is_fp8 else wide

    def x_TD(self, rank: int) -> Tensor:
        noise = torch.Generator().manual_seed(rank)
        return torch.randn(len(POSITIONS[rank]), CONFIG.hidden_size, generator=noise).to(self.dtype)

    def outputs(self) -> list[MoeOutput]:
        return run_ranks(3, self._on_rank, timeout_s=60)

    def _on_rank(self, transport: Any) -> MoeOutput:
        placement, rank = spread(CONFIG.num_experts, 3, 3), transport.rank
        exchange = Exchange(
            transport,
            num_slots=placement.num_slots,
            hidden=CONFIG.hidden_size,
            top_k=CONFIG.top_k,
            dtype=self.dtype,
            device="cpu",
            config=ExchangeConfig(
                exchange=self.exchange, hierarchical="off", round_tokens=8, dispatch_dtype=self.dispatch_dtype
            ),
            ops=exchange_ops(self.ops),
        )
        weights = replace(self.weights, bank=take_slots(self.weights.bank, placement.experts_of(rank)))
        table = placement.table(rank=rank)
        layer = MoeLayer(CONFIG, weights, exchange=exchange, table=table, rank=rank, ops=moe_ops(self.ops))
        with torch.inference_mode():
            stages = layer.stages(
                self.x_TD(rank), step=0, layer=0, track=0, terms=Terms(bucket=5),
                positions_T=torch.tensor(POSITIONS[rank], dtype=torch.int64),
            )  # fmt: skip
            [output] = drive([stages])
        return output


def in_float64(weights: MoeWeights) -> MoeWeights:
    assert weights.shared is not None
    assert weights.bias_E is not None
    return MoeWeights(
        gate_ED=weights.gate_ED.double(),
        bias_E=weights.bias_E.double(),
        shared=Mlp(gate_up_2FD=weights.shared.gate_up_2FD.double(), down_DF=weights.shared.down_DF.double()),
        bank=replace(
            weights.bank, gate_up_L2FD=weights.bank.gate_up_L2FD.double(), down_LDF=weights.bank.down_LDF.double()
        ),
    )


@pytest.mark.interpret
@pytest.mark.parametrize("exchange", ["exact", "bounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_is_the_dense_layer(dtype: torch.dtype, exchange: str) -> None:
    run = Run(ops="triton", dtype=dtype, exchange=exchange)
    outputs, expected = run.outputs(), replace(run, ops="reference").outputs()
    truth = in_float64(run.weights)
    for rank, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        real = torch.tensor(POSITIONS[rank], dtype=torch.int64) >= 0
        dense_TD = dense_moe(run.x_TD(rank).double(), truth, CONFIG)
        assert_close_rows(output.out_TD[real], dense_TD[real], most_cosine=1e-5)
        assert output.out_TD.dtype == dtype
        assert torch.equal(output.counts_E, other.counts_E)
        assert int(output.num_pairs) == other.num_pairs
    assert sum(int(output.num_pairs) for output in outputs) == 5 * CONFIG.top_k


@pytest.mark.interpret
@pytest.mark.parametrize("dispatch_dtype", ["run", "fp8"])
def test_an_fp8_layer_is_the_layer_in_torch_but_for_its_activations(dispatch_dtype: str) -> None:
    """Torch keeps activations in the run dtype, kernels have them in fp8: 2 ** -4 of each value at most."""
    run = Run(ops="triton", is_fp8=True, dispatch_dtype=dispatch_dtype)
    found = torch.cat([output.out_TD for output in run.outputs()]).double()
    expected = torch.cat([output.out_TD for output in replace(run, ops="reference").outputs()]).double()
    cosine = 1 - (found * expected).sum() / (found.norm() * expected.norm())
    assert cosine < 2e-3, cosine


@pytest.mark.interpret
@pytest.mark.parametrize("num_tokens", [0, 1, 21])
def test_a_gated_mlp_is_that_of_torch_in_float64(num_tokens: int) -> None:
    noise = torch.Generator().manual_seed(1)
    x, gate_up, down = (
        torch.randn(*shape, generator=noise).bfloat16() for shape in ((num_tokens, 72), (2 * 40, 72), (72, 40))
    )
    truth = gated_mlp(x.double(), gate_up.double(), down.double())
    mlp = Mlp(gate_up_2FD=gate_up, down_DF=down)
    assert_close_rows(moe_ops("triton").mlp(x, mlp), truth, most_cosine=1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("num_tokens", [0, 1, 21])
def test_a_gated_mlp_in_fp8_rounds_where_the_truth_does(num_tokens: int) -> None:
    weights = random_weights(CONFIG, seed=3, dtype=torch.float32)
    bank = quantize_bank(take_slots(weights.bank, [2]))
    x = 8 * torch.randn(num_tokens, 72, generator=torch.Generator().manual_seed(1))
    mlp = Mlp(gate_up_2FD=bank.gate_up_L2FD[0], down_DF=bank.down_LDF[0], scales=bank.scales)
    truth = run_fp8_expert(x, bank, 0)
    assert_close_rows(moe_ops("triton").mlp(x, mlp), truth, most_cosine=1e-3)
    plain = moe_ops("reference").mlp(x, mlp)
    assert torch.equal(plain, gated_mlp(x, *bank.slot_weights(0, torch.float32)))


def test_without_triton_the_reader_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith(("ep.", "moe.")) and "kernel" in name]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"pip install 'serried\[gpu\]', or choose reference"):
        moe_ops("triton")
    moe_ops("reference")
    assert set(OPS) == {"reference", "numba", "triton"}
