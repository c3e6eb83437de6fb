"""A packed row's fields are aligned and survive; fp8 values come back within their step."""

from __future__ import annotations

import pytest
import torch

from ep import wide
from ep.rows import HEADER_WORDS, BackFormat, Fp8Codec, RowFormat, Rows, RunCodec

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "top_k"), [(1, 1), (7, 3), (64, 8)])
def test_fields_are_aligned_do_not_overlap_and_come_back(hidden, top_k, dtype):
    codec = RunCodec(hidden, dtype)
    row = RowFormat(top_k, wide(dtype), codec.value_bytes)
    assert all(begin % 8 == 0 for begin in (*row.begins, row.num_bytes))
    packed = torch.zeros(5, row.num_bytes, dtype=torch.uint8)
    fields = row.fields(packed)
    x = torch.randn(5, hidden, dtype=torch.float64).to(dtype)
    sent = Rows(
        torch.arange(5),
        torch.arange(5 * top_k).view(5, top_k),
        torch.rand(5, top_k, dtype=wide(dtype)),
        codec.encode(x, row.word),
    )
    for field, values in zip(fields, sent, strict=True):
        field.copy_(values)
    for field, values in zip(row.fields(packed), sent, strict=True):
        assert torch.equal(field, values)
    assert torch.equal(codec.decode(row.fields(packed).values_NX), x)


def test_a_header_leaves_origin_and_slots_alone():
    row = RowFormat(2, torch.float32, 2)
    packed = torch.zeros(3, row.num_bytes, dtype=torch.uint8)
    row.fields(packed).slots_NK.fill_(-1)
    row.header(packed).fill_(7)
    assert row.header(packed).shape == (3, HEADER_WORDS)
    assert (row.fields(packed).slots_NK == -1).all()
    assert (row.fields(packed).origin_N == 0).all()
    assert BackFormat(1, torch.bfloat16).block_row_bytes == 8 * HEADER_WORDS


def test_values_that_lie_at_an_odd_place_or_in_columns_are_sent_all_the_same():
    codec = RunCodec(4, torch.bfloat16)
    base = torch.arange(25, dtype=torch.bfloat16)
    for x in (base[1:].view(6, 4), base[:24].view(4, 6).t(), base[:0].unsqueeze(1).expand(0, 4)):
        assert torch.equal(codec.decode(codec.encode(x, torch.int64)), x)


@pytest.mark.parametrize("hidden", [1, 127, 128, 300])
def test_fp8_values_come_back_within_half_a_step_of_their_block(hidden):
    """e4m3 has 3 bits of mantissa: a value is off by 1/16 of itself at most, or by half the smallest step of its block,
    2^-10 of the largest it can hold, 448."""
    codec = Fp8Codec(hidden, torch.float32)
    x = torch.randn(9, hidden) * torch.logspace(-3, 3, 9)[:, None]
    x[3] = 0
    word = RowFormat(1, torch.float32, codec.value_bytes).word
    back = codec.decode(codec.encode(x, word))
    blocks = torch.nn.functional.pad(x, (0, -hidden % 128)).unflatten(1, (-1, 128))
    scale = blocks.abs().amax(2).clamp_min(1e-4) / 448
    step = scale.repeat_interleave(128, 1)[:, :hidden]
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, step * 2**-10) * (1 + 1e-6)).all()
    assert (back[3] == 0).all()
    peaks = x.abs().amax(1) > 0.1
    assert torch.allclose(back.abs().amax(1)[peaks], x.abs().amax(1)[peaks], rtol=1e-6)
