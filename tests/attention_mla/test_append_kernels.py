"""Norm, rotation and append in Triton's interpreter against the torch functions that the reference path uses."""

import pytest
import torch
from torch import Tensor

from attention_mla import RopeConfig, YarnScaling, angles, rms_norm, rotate
from attention_mla.append_kernels import append, turn_queries
from attention_mla.latent_rows import LatentRows, fp8_row_bytes
from attention_mla.rope import Rotation

pytestmark = pytest.mark.interpret

ROPE = RopeConfig(theta=100.0, scaling=YarnScaling(factor=4.0, original_max_position=64, mscale=0.7))
RIGHT_ANGLE = Rotation(turn_TP2=torch.complex(torch.zeros(1, 1), torch.ones(1, 1)))


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(num_tokens: int, rank: int, rope_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Latents and rope keys as parts of wider rows, as the down projection leaves them; and the norm's weight."""
    down_TX = numbers(num_tokens, 5 + rank + rope_dim, dtype=dtype, seed=1)
    return down_TX[:, 5 : 5 + rank], down_TX[:, 5 + rank :], numbers(rank, dtype=dtype, seed=2)


def test_the_docstrings_latent_and_rope_key_are_appended():
    rows = LatentRows.plain(torch.full((3, 4), torch.nan), 2)
    append(
        torch.tensor([[3.0, 4.0]]),
        torch.tensor([[1.0, 0.0]]),
        norm_C=torch.tensor([1.0, 2.0]),
        eps=0.0,
        rotation=RIGHT_ANGLE,
        interleaved=True,
        places_T=torch.tensor([1]),
        rows=rows,
    )
    stored = torch.cat((rows.latents_NC, rows.rope_NP), dim=1)
    assert stored[1].tolist() == pytest.approx([0.848528, 2.262742, 0.0, 1.0], abs=1e-6)
    assert bool(stored[[0, 2]].isnan().all())


def test_the_docstrings_pair_is_turned():
    out = torch.empty(1, 1, 2)
    turn_queries(torch.tensor([[[3.0, 5.0]]]), rotation=RIGHT_ANGLE, interleaved=True, out_THP=out)
    assert out.flatten().tolist() == [-5.0, 3.0]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("num_tokens", "rank", "rope_dim"), [(0, 8, 4), (1, 12, 6), (5, 40, 10)])
def test_plain_rows_are_those_of_norm_and_rotate(
    num_tokens: int, rank: int, rope_dim: int, dtype: torch.dtype, interleaved: bool
):
    latent_TC, rope_TP, norm_C = inputs(num_tokens, rank, rope_dim, dtype)
    rotation = angles(ROPE, rope_dim, torch.arange(num_tokens) * 77, dtype)
    places_T = torch.arange(num_tokens) * 2
    rows = LatentRows.plain(torch.full((12, rank + rope_dim), torch.nan, dtype=dtype), rank)
    append(
        latent_TC,
        rope_TP,
        norm_C=norm_C,
        eps=1e-6,
        rotation=rotation,
        interleaved=interleaved,
        places_T=places_T,
        rows=rows,
    )
    wanted = torch.cat((rms_norm(latent_TC, norm_C, 1e-6), rotate(rope_TP, rotation, interleaved)), dim=1)
    stored = torch.cat((rows.latents_NC, rows.rope_NP), dim=1)
    unit = torch.finfo(dtype).eps
    assert torch.allclose(stored[places_T], wanted, rtol=2 * unit, atol=2 * unit)
    assert bool(stored[1::2].isnan().all())


def test_padding_is_not_written_anywhere():
    latent_TC, rope_TP, norm_C = inputs(2, 12, 6, torch.float32)
    rows = LatentRows.plain(torch.full((4, 18), torch.nan), 12)
    append(
        latent_TC,
        rope_TP,
        norm_C=norm_C,
        eps=1e-6,
        rotation=angles(ROPE, 6, torch.arange(2), torch.float32),
        interleaved=True,
        places_T=torch.tensor([-1, 1]),
        rows=rows,
    )
    assert [bool(row.isnan().all()) for row in rows.latents_NC] == [True, False, True, True]
    assert [bool(row.isnan().any()) for row in rows.latents_NC] == [True, False, True, True]


def test_fp8_rows_hold_the_bytes_that_the_reference_makes_of_plain_rows():
    num_tokens, rank, rope_dim = 7, 256, 16
    latent_TC, rope_TP, norm_C = inputs(num_tokens, rank, rope_dim, torch.float32)
    latent_TC[3] = 0
    rotation = angles(ROPE, rope_dim, torch.arange(num_tokens), torch.float32)
    places_T = torch.tensor([4, 0, 7, 2, -1, 5, 1])
    stored, wanted = (torch.full((9, fp8_row_bytes(rank, rope_dim)), 7, dtype=torch.uint8) for _ in range(2))
    fp8, by_torch = (LatentRows.fp8(each, rank=rank, rope_dim=rope_dim) for each in (stored, wanted))
    plain_NW = torch.zeros(9, rank + rope_dim)
    for rows in (fp8, LatentRows.plain(plain_NW, rank)):
        append(
            latent_TC,
            rope_TP,
            norm_C=norm_C,
            eps=1e-6,
            rotation=rotation,
            interleaved=True,
            places_T=places_T,
            rows=rows,
        )
    written = places_T[places_T >= 0]
    by_torch.write(plain_NW[written], written)
    assert torch.equal(stored, wanted)
    assert bool(stored[[3, 6, 8]].eq(7).all())  # nobody's places


def test_fp8_rows_round_rope_keys_halfway_between_two_numbers_to_the_even_one():
    bytes_NX = torch.zeros(2, fp8_row_bytes(128, 2), dtype=torch.uint8)
    rows = LatentRows.fp8(bytes_NX, rank=128, rope_dim=2)
    append(
        torch.ones(1, 128),
        torch.tensor([[1.00390625, 1.01171875]]),
        norm_C=torch.ones(128),
        eps=0.0,
        rotation=Rotation(turn_TP2=torch.ones(1, 1, dtype=torch.complex64)),
        interleaved=True,
        places_T=torch.tensor([0]),
        rows=rows,
    )
    assert rows.rope_NP[0].tolist() == [1.0, 1.015625]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("heads", [3, 20])
def test_queries_turn_as_the_reference_turns_them(heads: int, num_tokens: int, dtype: torch.dtype):
    whole_THQ = numbers(num_tokens, heads, 17, dtype=dtype, seed=4)
    rotation = angles(ROPE, 6, torch.arange(num_tokens) * 31, dtype)
    out_THP = torch.full((num_tokens, heads, 6), torch.nan, dtype=dtype)
    turn_queries(whole_THQ[..., 11:], rotation=rotation, interleaved=False, out_THP=out_THP)
    unit = torch.finfo(dtype).eps
    assert torch.allclose(out_THP, rotate(whole_THQ[..., 11:], rotation, False), rtol=2 * unit, atol=2 * unit)


def test_a_row_of_the_models_takes_656_bytes():
    assert fp8_row_bytes(512, 64) == 656
    with pytest.raises(AssertionError, match="a latent of 100 does not fill groups of 128"):
        fp8_row_bytes(100, 64)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_token_is_appended_and_turned_alike_whoever_stands_beside(fp8: bool):
    latent_TC, rope_TP, norm_C = inputs(5, 128, 6, torch.bfloat16)
    whole_THP = numbers(5, 3, 6, dtype=torch.bfloat16, seed=4)

    def appended(tokens: list[int]) -> tuple[Tensor, Tensor]:
        stored_NX = torch.full((9, fp8_row_bytes(128, 6)), 0xFF, dtype=torch.uint8)
        plain_NW = torch.full((9, 134), torch.nan, dtype=torch.bfloat16)
        rows = LatentRows.fp8(stored_NX, rank=128, rope_dim=6) if fp8 else LatentRows.plain(plain_NW, 128)
        at_T = torch.tensor(tokens)
        rotation, out_THP = angles(ROPE, 6, at_T * 31, torch.bfloat16), torch.full_like(whole_THP[at_T], torch.nan)
        given = {"norm_C": norm_C, "eps": 1e-6, "rotation": rotation, "interleaved": True}
        append(latent_TC[at_T], rope_TP[at_T], places_T=at_T, rows=rows, **given)
        turn_queries(whole_THP[at_T], rotation=rotation, interleaved=True, out_THP=out_THP)
        return rows.stored_NX[3], out_THP[tokens.index(3)]

    for among, alone in zip(appended([0, 1, 2, 3, 4]), appended([3]), strict=True):
        assert torch.equal(among, alone)
        assert not bool(among.isnan().any())
