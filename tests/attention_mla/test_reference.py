"""The two forms against the definition written out head by head, and against each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import (
    CacheFormat,
    LatentCache,
    MlaConfig,
    MlaWeights,
    Partial,
    Queries,
    Tiling,
    absorbed_attention,
    merge,
    naive_attention,
    reference,
)
from tests.attention_mla.spans import Span, view_of

AssertNear = Callable[[Tensor, Tensor, float], None]
USUAL = Tiling()
CONTEXTS = [1, 2, 63, 64, 65, 129, 4097]


class Case:
    """Some last tokens of one request over cached random latents, in float64."""

    def __init__(self, config: MlaConfig, weights: MlaWeights, num_tokens: int, context_len: int, page_size: int = 64):
        generator = torch.Generator().manual_seed(context_len)
        count = -(-context_len // page_size)
        self.config, self.weights, self.page_size = config, weights, page_size
        self.pages = torch.randperm(count + 2, generator=generator)[:count].tolist()
        self.span = Span(num_tokens=num_tokens, context_len=context_len, pages=self.pages)
        shape = (num_tokens, config.num_heads)
        self.queries = Queries(
            nope_THN=torch.randn(*shape, config.qk_nope_head_dim, generator=generator, dtype=torch.float64),
            rope_THP=torch.randn(*shape, config.qk_rope_head_dim, generator=generator, dtype=torch.float64),
        )
        self.context_SW = torch.randn(context_len, config.latent_width, generator=generator, dtype=torch.float64)
        self.cache = LatentCache(1, count + 2, page_size, CacheFormat.of(config, torch.float64))
        whole = view_of([Span(num_tokens=context_len, context_len=context_len, pages=self.pages)], page_size=page_size)
        self.cache.append(0, self.context_SW, whole.places_T)

    def naive(self, tiling: Tiling = USUAL) -> Tensor:
        view = view_of([self.span], page_size=self.page_size, max_absorbed_tokens=0, tiling=tiling)
        return naive_attention(
            self.queries,
            self.weights,
            latents=self.cache.rows(0),
            prompt=view.prompts[0],
            softmax_scale=self.config.softmax_scale,
        )

    def absorbed(self, tiling: Tiling = USUAL) -> Tensor:
        count = self.span.num_tokens
        rows = view_of([self.span], page_size=self.page_size, max_absorbed_tokens=count, tiling=tiling).decode
        out_RHV = absorbed_attention(
            self.queries.take(rows.tokens_R),
            self.weights.heads,
            latents=self.cache.rows(0),
            rows=rows,
            softmax_scale=self.config.softmax_scale,
        )
        return torch.empty_like(out_RHV).index_copy_(0, rows.tokens_R, out_RHV)

    def definition(self) -> Tensor:
        """softmax(scale * q . k) v, one token and one head at a time."""
        out_THV = torch.empty(self.span.num_tokens, self.config.num_heads, self.config.v_head_dim, dtype=torch.float64)
        rank = self.config.kv_lora_rank
        for token in range(self.span.num_tokens):
            visible = self.span.context_len - self.span.num_tokens + token + 1
            latent_SC, rope_SP = self.context_SW[:visible, :rank], self.context_SW[:visible, rank:]
            for head in range(self.config.num_heads):
                key_SN = latent_SC @ self.weights.w_uk_HNC[head].T
                value_SV = latent_SC @ self.weights.w_uv_HVC[head].T
                score_S = key_SN @ self.queries.nope_THN[token, head] + rope_SP @ self.queries.rope_THP[token, head]
                out_THV[token, head] = torch.softmax(score_S * self.config.softmax_scale, 0) @ value_SV
        return out_THV


@pytest.fixture(scope="module")
def case(small_config: MlaConfig, tensors_of: Callable[..., dict[str, Tensor]]) -> Callable[..., Case]:
    weights = MlaWeights.build(small_config, tensors_of(small_config, torch.float64))
    return lambda num_tokens, context_len, **options: Case(small_config, weights, num_tokens, context_len, **options)


@pytest.mark.parametrize("context_len", CONTEXTS)
def test_one_token_is_the_definition_in_both_forms(
    context_len: int, case: Callable[..., Case], assert_near: AssertNear
) -> None:
    one = case(1, context_len)
    assert_near(one.absorbed(), one.definition(), 1e-12)
    assert_near(one.naive(), one.definition(), 1e-12)


@pytest.mark.parametrize(("num_tokens", "context_len"), [(2, 2), (5, 64), (9, 65), (33, 129), (65, 65), (7, 4099)])
def test_several_tokens_are_the_definition_in_both_forms(
    num_tokens: int, context_len: int, case: Callable[..., Case], assert_near: AssertNear
) -> None:
    several = case(num_tokens, context_len)
    assert_near(several.absorbed(), several.definition(), 1e-12)
    assert_near(several.naive(), several.definition(), 1e-12)


@pytest.mark.parametrize("context_len", [1, 64, 65, 129, 1025])
def test_naive_is_absorbed_whatever_the_tiles(
    context_len: int, case: Callable[..., Case], assert_near: AssertNear
) -> None:
    several = case(min(37, context_len), context_len, page_size=16)
    expected = several.naive()
    for size in (1, 5, 64, 4096):
        if size == 1 and context_len > 129:
            continue
        tiling = Tiling(split_tokens=size, context_chunk=size, query_block=max(size // 3, 1))
        assert_near(several.absorbed(tiling), expected, 1e-12)
        assert_near(several.naive(tiling), expected, 1e-12)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_size_changes_nothing_at_all(page_size: int, case: Callable[..., Case]) -> None:
    pages_of_64, other = case(9, 129), case(9, 129, page_size=page_size)
    other.queries, other.context_SW = pages_of_64.queries, pages_of_64.context_SW
    whole = view_of([Span(num_tokens=129, context_len=129, pages=other.pages)], page_size=page_size)
    other.cache.append(0, other.context_SW, whole.places_T)
    assert torch.equal(other.absorbed(), pages_of_64.absorbed())
    assert torch.equal(other.naive(), pages_of_64.naive())


def test_merge_is_softmax_over_both_pieces(assert_near: AssertNear) -> None:
    scores_TS = torch.tensor([[0.0, 1.0, 700.0, -700.0], [3.0, -2.0, 1.0, 0.5]], dtype=torch.float64)
    values_S = torch.tensor([1.0, -2.0, 5.0, 7.0], dtype=torch.float64)

    def piece(part: slice) -> Partial:
        shares = scores_TS[:, part].softmax(-1)
        return Partial((shares @ values_S[part]).unsqueeze(-1), scores_TS[:, part].logsumexp(-1))

    merged = merge(merge(piece(slice(0, 1)), piece(slice(1, 3))), piece(slice(3, 4)))
    whole = piece(slice(0, 4))
    assert_near(merged.mean, whole.mean, 1e-14)
    assert_near(merged.lse, whole.lse, 1e-14)


def test_piece_that_a_query_cannot_see_leaves_its_partial_as_it_was() -> None:
    seen = Partial(torch.tensor([[2.0, -3.0]]), torch.tensor([-50.0]))
    unseen = Partial(torch.tensor([[9.0, 9.0]]), torch.tensor([-1e30]))
    merged = merge(seen, unseen)
    assert torch.equal(merged.mean, seen.mean)
    assert torch.equal(merged.lse, seen.lse)


@pytest.mark.parametrize("form", ["naive", "absorbed"])
def test_scores_far_from_zero_stay_finite(form: str, case: Callable[..., Case], assert_near: AssertNear) -> None:
    steep = case(5, 65)
    steep.queries = Queries(nope_THN=steep.queries.nope_THN * 500, rope_THP=steep.queries.rope_THP * 500)
    out: Any = getattr(steep, form)(Tiling(split_tokens=7, context_chunk=7, query_block=2))
    assert_near(out, steep.definition(), 1e-11)


@pytest.mark.parametrize(("num_tokens", "context_len"), [(1, 129), (9, 65), (33, 129), (70, 600)])
def test_rows_are_the_same_however_few_are_widened_at_once(
    num_tokens: int,
    context_len: int,
    case: Callable[..., Case],
    assert_near: AssertNear,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several, tiling = case(num_tokens, context_len), Tiling(split_tokens=64)
    together = several.absorbed(tiling)
    for tile_bytes in (1, 3 * 64 * several.config.latent_width * 8):
        monkeypatch.setattr(reference, "TILE_BYTES", tile_bytes)
        assert_near(several.absorbed(tiling), together, 1e-13)
