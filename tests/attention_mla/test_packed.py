"""Weights packed for oneDNN against the same products in float64, and a whole block against the one in torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import attention_ops
from attention_mla.packed import PackedHeads, PackedLinear
from attention_mla.weights import MlaWeights, mla_shapes

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="no bf16 matmul of oneDNN here",
)
STEPS = [[(0, 20), (1, 3)], [(0, 1), (1, 2), (2, 1)], [(2, 6)], [(0, 1), (2, 1)]]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(found: Tensor, truth: Tensor) -> None:
    """Within one rounding to 8 bits of the largest value."""
    assert found.dtype == torch.bfloat16
    assert found.shape == truth.shape
    assert float((found.double() - truth).abs().max()) <= 2**-8 * float(truth.abs().max())


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_a_packed_matrix_multiplies_as_it_did(num_tokens: int):
    x_TD, weight_ND = drawn(num_tokens, 40), drawn(70, 40, seed=1)
    assert_rounded(PackedLinear()(x_TD, weight_ND), x_TD.double() @ weight_ND.double().T)


def test_rows_may_be_columns_of_something_wider():
    x_TD, weight_ND = drawn(5, 60)[:, 13:53], drawn(70, 40, seed=1)
    assert_rounded(PackedLinear()(x_TD, weight_ND), x_TD.double() @ weight_ND.double().T)


def test_no_rows_give_no_rows():
    assert PackedLinear()(drawn(0, 40), drawn(70, 40)).shape == (0, 70)


def test_each_weight_is_packed_once_and_none_is_taken_for_another():
    linear, x_TD = PackedLinear(), drawn(3, 40)
    weights = [drawn(70, 40, seed=seed) for seed in range(3)]
    first = [linear(x_TD, weight_ND) for weight_ND in weights]
    kept = [weight_ND.clone() for weight_ND in weights]
    for weight_ND in weights:
        weight_ND.zero_()  # what is multiplied from now on is the copy
    for found, again, weight_ND in zip(first, [linear(x_TD, each) for each in weights], kept, strict=True):
        assert torch.equal(found, again)
        assert_rounded(found, x_TD.double() @ weight_ND.double().T)


def test_heads_lie_one_after_the_other_and_are_packed_once(make_config: Any):
    config = make_config()
    weights = MlaWeights.build(
        config, {name: drawn(*shape, seed=seed) for seed, (name, shape) in enumerate(mla_shapes(config).items())}
    )
    heads, packed = weights.heads, PackedHeads()
    found = packed(weights)
    assert packed(weights) is found
    for half, plain in zip(found, heads, strict=True):
        assert half.is_contiguous()
        assert not plain.is_contiguous()
        assert torch.equal(half, plain)


@pytest.mark.parametrize("q_lora_rank", [None, 10])
def test_a_block_is_as_near_the_truth_as_the_one_in_torch(
    q_lora_rank: int | None, rank_of: Callable[..., Any], hidden: Callable[..., Tensor], make_config: Any
):
    config = make_config(q_lora_rank=q_lora_rank)
    inputs = [hidden(40, seed=seed, dtype=torch.bfloat16, config=config) for seed in range(3)]
    found, plain = (
        torch.cat(rank_of(inputs, config=config, poison=float("nan"), ops=attention_ops(name)).run(STEPS)).double()
        for name in ("onednn", "reference")
    )
    assert float((found - plain).norm() / plain.norm()) < 2**-6
