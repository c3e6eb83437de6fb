"""A prompt through torch's flash attention gives what it gives in the reference, however it is cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import MlaConfig, MlaWeights, Queries, naive_attention, prompt
from attention_mla.latent_rows import LatentRows
from attention_mla.prompt import flash_attention
from tests.attention_mla.spans import Span, view_of


def operands(config: MlaConfig, context: int, num_tokens: int, dtype: torch.dtype, tensors_of: Any) -> tuple[Any, ...]:
    noise = torch.Generator().manual_seed(context)
    size = 2 * context + 16

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(dtype)

    queries = Queries(
        nope_THN=draw(num_tokens, config.num_heads, config.qk_nope_head_dim),
        rope_THP=draw(num_tokens, config.num_heads, config.qk_rope_head_dim),
    )
    latents_NW = torch.full((size + 1, config.latent_width), torch.nan, dtype=dtype)
    pages = torch.randperm(size // 4, generator=noise).tolist()[: -(-context // 4)]
    view = view_of([Span(num_tokens, context, pages)], page_size=4, max_absorbed_tokens=0)
    places = torch.cat([chunk.places_S for chunk in view.prompts[0].chunks])
    latents_NW[places] = draw(context, config.latent_width)
    latents = LatentRows.plain(latents_NW, config.kv_lora_rank)
    return queries, MlaWeights.build(config, tensors_of(config, dtype)), latents, view.prompts[0]


@pytest.mark.parametrize(("context", "num_tokens"), [(1, 1), (5, 5), (9, 2), (23, 7), (40, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_merge_to_what_the_reference_gives(
    context: int,
    num_tokens: int,
    dtype: torch.dtype,
    small_config: MlaConfig,
    tensors_of: Callable[..., dict[str, Tensor]],
    assert_near: Callable[[Tensor, Tensor, float], None],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(prompt, "PIECE", 8)
    queries, weights, latents, span = operands(small_config, context, num_tokens, dtype, tensors_of)
    given = {"latents": latents, "prompt": span, "softmax_scale": small_config.softmax_scale}
    found = flash_attention(queries, weights, **given)
    assert_near(found, naive_attention(queries, weights, **given), 2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_pieces_are_cut_at_the_first_query(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt, "PIECE", 2)
    assert prompt._pieces(3, 6) == [range(2), range(2, 3), range(3, 5), range(5, 6)]
    assert prompt._pieces(0, 2) == [range(2)]
