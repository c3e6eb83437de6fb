"""A block with Triton's kernels (in the interpreter) against the same block in torch, over steps of mixed spans."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import Fp8Matrix, Fp8Rows, MlaConfig, MlaWeights, attention_ops, plain, rms_norm
from attention_mla.ops import REFERENCE, TritonOps
from moe.quant import dequantize_blocks, quantize_blocks

STEPS = [[(0, 20), (1, 3)], [(0, 1), (1, 2), (2, 1)], [(2, 6)], [(0, 1), (2, 1)]]
"""Prompts, one token, several tokens and both together, in turn."""


@pytest.mark.interpret
@pytest.mark.parametrize("q_lora_rank", [None, 10])
def test_a_block_gives_what_it_gives_in_torch(
    q_lora_rank: int | None,
    rank_of: Callable[..., Any],
    hidden: Callable[..., Tensor],
    make_config: Callable[..., MlaConfig],
    assert_near: Callable[[Tensor, Tensor, float], None],
):
    config = make_config(q_lora_rank=q_lora_rank)
    inputs = [hidden(40, seed=seed, dtype=torch.float32, config=config) for seed in range(3)]
    outputs = []
    for ops in (None, TritonOps(split_tokens=16)):
        block = rank_of(inputs, config=config, poison=float("nan"), **({"ops": ops} if ops else {}))
        outputs.append(block.run(STEPS))
    for wanted, found in zip(*outputs, strict=True):
        assert_near(found, wanted, 1e-5)


def in_fp8_blocks(matrix_ND: Tensor) -> Fp8Matrix:
    values_ND, scales_QG = quantize_blocks(matrix_ND)
    return Fp8Matrix(values_ND=values_ND, scales_QG=scales_QG)


def in_fp8(weights: MlaWeights) -> tuple[MlaWeights, MlaWeights]:
    """Weights whose matrices are in fp8 blocks, and what those stand for."""
    parts = {name: getattr(weights, name) for name in ("down_XD", "q_b", "o_DU")}
    narrow = {name: in_fp8_blocks(matrix) for name, matrix in parts.items() if matrix is not None}
    wide = {name: dequantize_blocks(each.values_ND, each.scales_QG, torch.float32) for name, each in narrow.items()}
    return replace(weights, **narrow), replace(weights, **wide)


@pytest.mark.interpret
def test_a_block_with_weights_in_fp8_is_near_the_block_of_what_they_stand_for(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor], make_config: Any
):
    config = make_config(q_lora_rank=136, hidden_size=200)
    inputs = [hidden(40, seed=seed, dtype=torch.float32, config=config) for seed in range(3)]
    outputs = []
    for ops, part in ((REFERENCE, 1), (TritonOps(split_tokens=16), 0)):
        block = rank_of(inputs, config=config, poison=float("nan"), ops=ops)
        block.weights = in_fp8(block.weights)[part]
        outputs.append(block.run(STEPS[:2]))
    for wanted, found in zip(*outputs, strict=True):
        # Rows are rounded to 4 bits before each of two or three matmuls, whose sums even that out.
        assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.06


@pytest.mark.interpret
def test_a_norm_before_a_matrix_in_fp8_leaves_what_that_reads(hidden: Callable[..., Tensor]):
    ops, x_TD = attention_ops("triton"), hidden(3, dtype=torch.float32)
    matrix = in_fp8_blocks(torch.eye(24))
    weight_D = hidden(1, dtype=torch.float32, seed=2)[0]
    rows = ops.norm(x_TD, weight_D, 1e-5, before=matrix)
    assert isinstance(rows, Fp8Rows)
    truth_TD = rms_norm(x_TD, weight_D, 1e-5)
    assert torch.allclose(ops.linear(rows, matrix), truth_TD, rtol=2**-4, atol=1e-2)
    assert torch.equal(ops.linear(plain(ops.norm(x_TD, weight_D, 1e-5)), matrix), ops.linear(rows, matrix))
    sum_TD, same = ops.add_norm(x_TD, None, weight_D, 1e-5, before=matrix)
    assert sum_TD is x_TD
    assert torch.equal(ops.linear(same, matrix), ops.linear(rows, matrix))


@pytest.mark.interpret
def test_both_know_the_sum_and_the_norm(hidden: Callable[..., Tensor]):
    x_TD, update_TD = hidden(3, dtype=torch.float32), hidden(3, dtype=torch.float32, seed=1)
    weight_D = hidden(1, dtype=torch.float32, seed=2)[0]
    for name in ("reference", "triton"):
        ops = attention_ops(name)
        sum_TD, h_TD = ops.add_norm(x_TD, update_TD, weight_D, 1e-5)
        assert torch.allclose(sum_TD, x_TD + update_TD)
        assert torch.allclose(h_TD, rms_norm(sum_TD, weight_D, 1e-5), atol=1e-6)
        assert torch.allclose(ops.norm(x_TD, weight_D, 1e-5), rms_norm(x_TD, weight_D, 1e-5), atol=1e-6)


def test_without_triton_the_room_is_whole_and_says_what_is_missing():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import attention_mla\n"
        "attention_mla.attention_ops('reference')\n"
        "try:\n    attention_mla.attention_ops('triton')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (
        "ops is 'triton'; it needs the package triton: pip install 'serried[gpu]', or choose reference\n"
    )


def test_without_numba_the_room_is_whole_and_says_what_is_missing():
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "import attention_mla\n"
        "attention_mla.attention_ops('reference')\n"
        "try:\n    attention_mla.attention_ops('numba')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ("ops is 'numba'; it needs the package numba: pip install numba, or choose reference\n")
