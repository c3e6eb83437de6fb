"""Torch's product is taken where it is there, right and faster; the layout that it wants is made of ours."""

from __future__ import annotations

import pytest
import torch

from attention_mla.matrix import Fp8Matrix, Fp8Rows, linear_blocks
from attention_mla.scaled_products import ChosenProduct, torch_product

FP8 = torch.float8_e4m3fn


def matrix(num_outputs: int = 300, dim: int = 384) -> Fp8Matrix:
    noise = torch.Generator().manual_seed(num_outputs)
    scales_QG = torch.rand(-(-num_outputs // 128), dim // 128, generator=noise) + 0.01
    return Fp8Matrix(values_ND=torch.randn(num_outputs, dim, generator=noise).mul(64).to(FP8), scales_QG=scales_QG)


def rows(num_tokens: int = 3, dim: int = 384) -> Fp8Rows:
    noise = torch.Generator().manual_seed(1)
    values_TD = torch.randn(num_tokens, dim, generator=noise).mul(64).to(FP8)
    return Fp8Rows(values_TD=values_TD, scales_TG=torch.rand(num_tokens, dim // 128) + 0.01, dtype=torch.bfloat16)


class Fake:
    """The exact product, wrong by a factor, or not there; `calls` counts."""

    def __init__(self, *, takes_us: float, factor: float = 1.0, lacks: str | None = None) -> None:
        self.takes_us, self.factor, self.lacks = takes_us, factor, lacks
        self.calls = 0

    def __call__(self, rows: Fp8Rows, matrix: Fp8Matrix) -> torch.Tensor:
        self.calls += 1
        if self.lacks is not None:
            raise RuntimeError(self.lacks)
        exact = linear_blocks(rows.values_TD, rows.scales_TG, matrix.values_ND, matrix.scales_QG)
        return (exact * self.factor).to(rows.dtype)


def chosen(ours: Fake, theirs: Fake) -> ChosenProduct:
    def timed_us(call) -> float:
        before = theirs.calls
        call()
        return theirs.takes_us if theirs.calls > before else ours.takes_us

    return ChosenProduct(ours, theirs, timed_us=timed_us)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (Fake(takes_us=3.0), ""),
        (Fake(takes_us=9.0), "torch's takes 9.0 us, the kernel 5.0"),
        (Fake(takes_us=3.0, factor=1.02), "torch's is off by 0.0"),
        (Fake(takes_us=3.0, factor=float("nan")), "torch's is off by nan"),
        (Fake(takes_us=3.0, lacks="needs compute capability 9.0\nand more"), "torch's: needs compute capability 9.0"),
    ],
    ids=["taken", "slower", "wrong", "no number", "not there"],
)
def test_torchs_is_taken_where_it_is_right_and_faster(theirs: Fake, why: str):
    ours = Fake(takes_us=5.0)
    product = chosen(ours, theirs)
    product(rows(), matrix())
    trial = product.trials[300, 384]
    assert trial.why.startswith(why)
    assert bool(trial.why) == bool(why)
    before = ours.calls, theirs.calls
    product(rows(5), matrix())
    assert (ours.calls - before[0], theirs.calls - before[1]) == ((1, 0) if why else (0, 1)), "and tried once"


def test_each_shape_of_a_weight_is_tried_by_itself():
    product = chosen(Fake(takes_us=5.0), Fake(takes_us=3.0))
    product(rows(), matrix(300))
    product(rows(), matrix(200))
    assert set(product.trials) == {(300, 384), (200, 384)}


def test_scales_are_handed_over_as_torch_lays_them_out(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[torch.Tensor, ...]] = []

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        assert (recipe_a.name, recipe_b.name) == ("BlockWise1x128", "BlockWise128x128")
        asked.append((a, b, scale_a, scale_b))
        return torch.zeros(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    x, weight = rows(3), matrix()
    assert torch_product(x, weight).shape == (3, 300)
    [(a, b, scale_a, scale_b)] = asked
    assert (a.stride(), b.stride()) == ((384, 1), (1, 384)), "rows, and the weight by column"
    assert (scale_a.shape, scale_a.stride()) == ((3, 3), (1, 3))
    assert torch.equal(scale_a, x.scales_TG)
    assert (scale_b.shape, scale_b.stride()) == ((4, 3), (1, 4)), "three blocks of columns, filled up to four"
    assert torch.equal(scale_b[:3].t(), weight.scales_QG)
