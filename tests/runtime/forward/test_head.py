"""Logits with packed weights: the same products, and only where packing loses nothing."""

import pytest
import torch

from runtime.forward.head import HEADS, head_of


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [0, 1, 20])
def test_a_head_from_a_bf16_checkpoint_is_packed_and_loses_nothing(num_rows: int):
    head_VD, h_BD = drawn(130, 40).bfloat16().float(), drawn(num_rows, 40, seed=1).bfloat16()
    wanted = h_BD.double() @ head_VD.double().T
    found = head_of("numba", head_VD.clone())(h_BD)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head_of("reference", head_VD)(h_BD).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_head_with_more_digits_than_bf16_has_keeps_them():
    head_VD, h_BD = drawn(130, 40), drawn(3, 40, seed=1).bfloat16()
    assert torch.equal(head_of("numba", head_VD)(h_BD), head_of("reference", head_VD)(h_BD))
    assert not torch.equal(head_VD.bfloat16().float(), head_VD)


def test_there_is_a_head_for_every_name_of_ops():
    assert set(HEADS) == {"reference", "numba", "triton"}
