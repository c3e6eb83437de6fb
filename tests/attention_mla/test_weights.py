"""Names and shapes are those of transformers' modules; what attention uses is laid out as its matmuls want it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import MlaConfig, MlaWeights, mla_shapes

Oracle = Callable[..., Any]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("q_lora_rank", [None, 10])
def test_names_and_shapes_are_those_of_transformers(
    family: str, q_lora_rank: int | None, make_config: Callable[..., MlaConfig], oracle: Oracle
) -> None:
    config = make_config(q_lora_rank=q_lora_rank)
    state = oracle(family, config).state_dict()
    assert mla_shapes(config) == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_up_projections_share_memory_with_kv_b(
    small_config: MlaConfig, tensors_of: Callable[..., dict[str, Tensor]]
) -> None:
    tensors = tensors_of(small_config, torch.float64)
    weights = MlaWeights.build(small_config, tensors)
    kv_b = tensors["kv_b_proj.weight"]
    # Head 1's rows follow head 0's 7 key rows and 9 value rows.
    assert torch.equal(weights.w_uk_HNC[1], kv_b[16:23])
    assert torch.equal(weights.w_uv_HVC[1], kv_b[23:32])
    assert weights.w_uk_HNC.data_ptr() == weights.kv_b_UC.data_ptr()
    assert weights.w_uv_HVC.untyped_storage().data_ptr() == weights.kv_b_UC.untyped_storage().data_ptr()


def test_everything_that_reads_the_hidden_state_is_one_matrix(
    make_config: Callable[..., MlaConfig], tensors_of: Callable[..., dict[str, Tensor]]
) -> None:
    for q_lora_rank, first in ((None, "q_proj.weight"), (10, "q_a_proj.weight")):
        config = make_config(q_lora_rank=q_lora_rank)
        tensors = tensors_of(config, torch.float32)
        weights = MlaWeights.build(config, tensors)
        assert torch.equal(weights.down_XD, torch.cat((tensors[first], tensors["kv_a_proj_with_mqa.weight"])))


def test_wrong_shape_names_the_tensor(small_config: MlaConfig, tensors_of: Callable[..., dict[str, Tensor]]) -> None:
    tensors = tensors_of(small_config, torch.float32)
    tensors["o_proj.weight"] = tensors["o_proj.weight"].T
    with pytest.raises(AssertionError, match=r"o_proj\.weight is \(27, 24\), not \(24, 27\)"):
        MlaWeights.build(small_config, tensors)
