"""Pages and the paged view, against positions and places counted by hand or in a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import LatentCache, PagedView, Span, Tiling, bytes_per_token
from attention_mla.view import UNSEEN


def test_token_bytes_are_those_of_deepseek_v3() -> None:
    assert bytes_per_token(num_layers=1, latent_width=576, dtype=torch.bfloat16) == 1152
    assert bytes_per_token(num_layers=61, latent_width=576, dtype=torch.bfloat16) == 70272


def test_latents_land_on_their_page_and_place_minus_one_is_skipped() -> None:
    cache = LatentCache(2, 3, 4, 5, torch.float32)
    cache.pages.zero_()
    latents_TW = torch.arange(20.0).view(4, 5) + 1
    cache.append(1, latents_TW, torch.tensor([9, -1, 0, -1]))
    expected = torch.zeros(2, 3, 4, 5)
    expected[1, 2, 1] = latents_TW[0]
    expected[1, 0, 0] = latents_TW[2]
    assert torch.equal(cache.pages, expected)
    assert torch.equal(cache.rows(1)[9], latents_TW[0])


def test_appending_nothing_changes_nothing() -> None:
    cache = LatentCache(1, 2, 4, 5, torch.float32)
    cache.pages.zero_()
    cache.append(0, torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert not cache.pages.any()


def test_view_places_a_decode_row_and_a_prompt_by_hand() -> None:
    view = PagedView.build(
        [Span(num_tokens=1, context_len=6, pages=[7, 2]), Span(num_tokens=3, context_len=5, pages=[1, 4])],
        page_size=4,
        max_absorbed_tokens=2,
    )
    assert view.positions_T.tolist() == [5, 2, 3, 4]
    assert view.places_T.tolist() == [2 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 4 * 4 + 0]
    assert view.decode.tokens_R.tolist() == [0]
    (split,) = view.decode.splits
    assert split.places.tolist() == [28, 29, 30, 31, 8, 9]
    assert split.bias_R1S is None
    (prompt,) = view.prompts
    assert prompt.tokens == slice(1, 4)
    (chunk,) = prompt.chunks
    assert chunk.places_S.tolist() == [4, 5, 6, 7, 16]
    (bias_QS,) = chunk.biases
    assert bias_QS is not None
    assert (bias_QS == UNSEEN).int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_short_span_becomes_one_decode_row_a_token_with_its_own_context() -> None:
    spans = [Span(num_tokens=3, context_len=10, pages=[5]), Span(num_tokens=1, context_len=9, pages=[6])]
    view = PagedView.build(spans, page_size=16, tiling=Tiling(split_tokens=8))
    # Contexts 8, 9, 10 and 9; the longest first, ties in token order.
    assert view.decode.tokens_R.tolist() == [2, 1, 3, 0]
    assert view.prompts == ()
    first, second = view.decode.splits
    assert (first.num_rows, first.bias_R1S) == (4, None)
    assert second.num_rows == 3
    assert second.places.view(3, 2).tolist() == [[88, 89], [88, 88], [104, 104]]
    assert second.bias_R1S is not None
    assert (second.bias_R1S == UNSEEN).int().tolist() == [[[0, 0]], [[0, 1]], [[0, 1]]]


def test_empty_view_is_ordinary() -> None:
    view = PagedView.build([], page_size=16)
    assert (view.num_tokens, view.decode.num_rows, view.decode.splits, view.prompts) == (0, 0, (), ())
    assert view.positions_T.dtype is view.places_T.dtype is torch.int64


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("tiling", [Tiling(split_tokens=7, context_chunk=10, query_block=3), Tiling()])
def test_view_agrees_with_a_loop(page_size: int, tiling: Tiling) -> None:
    generator = torch.Generator().manual_seed(page_size)
    lengths = [(1, 1), (40, 40), (1, 63), (4, 64), (3, 65), (70, 129), (5, 5), (1, 200)]
    spans = []
    pages = torch.randperm(1000, generator=generator).tolist()
    for num_tokens, context_len in lengths:
        count = -(-context_len // page_size) + 1  # one page more than needed
        spans.append(Span(num_tokens=num_tokens, context_len=context_len, pages=pages[:count]))
        pages = pages[count:]
    view = PagedView.build(spans, page_size=page_size, tiling=tiling)

    def place(span: Span, position: int) -> int:
        return span.pages[position // page_size] * page_size + position % page_size

    tokens = [(span, span.context_len - span.num_tokens + i) for span in spans for i in range(span.num_tokens)]
    assert view.positions_T.tolist() == [position for _, position in tokens]
    assert view.places_T.tolist() == [place(span, position) for span, position in tokens]

    seen_by_row = attended_by_rows(view)
    for row, token in enumerate(view.decode.tokens_R.tolist()):
        span, position = tokens[token]
        assert seen_by_row[row] == [place(span, earlier) for earlier in range(position + 1)]

    upprojected = [span for span in spans if span.num_tokens > 4]
    for span, prompt in zip(upprojected, view.prompts, strict=True):
        first = span.context_len - span.num_tokens
        assert tokens[prompt.tokens.start] == (span, first)
        assert tokens[prompt.tokens.stop - 1] == (span, span.context_len - 1)
        expected = [[place(span, key) for key in range(first + i + 1)] for i in range(span.num_tokens)]
        assert attended_by_prompt(prompt, span.num_tokens) == expected
        assert all(len(chunk.places_S) <= tiling.context_chunk for chunk in prompt.chunks)
    assert all(len(split.places) <= split.num_rows * tiling.split_tokens for split in view.decode.splits)


def attended_by_rows(view: PagedView) -> list[list[int]]:
    seen: list[list[int]] = [[] for _ in range(view.decode.num_rows)]
    for split in view.decode.splits:
        places_RS = split.places.view(split.num_rows, -1)
        bias_RS = torch.zeros(places_RS.shape) if split.bias_R1S is None else split.bias_R1S.squeeze(1)
        for row in range(split.num_rows):
            seen[row] += places_RS[row][bias_RS[row] == 0].tolist()
    return seen


def attended_by_prompt(prompt: Any, num_tokens: int) -> list[list[int]]:
    seen: list[list[int]] = [[] for _ in range(num_tokens)]
    for chunk in prompt.chunks:
        for block, bias_QS in enumerate(chunk.biases, start=chunk.first_block):
            queries = range(block * prompt.block, min((block + 1) * prompt.block, num_tokens))
            bias_QS = torch.zeros(len(queries), len(chunk.places_S)) if bias_QS is None else bias_QS
            for query, bias_S in zip(queries, bias_QS, strict=True):
                seen[query] += chunk.places_S[bias_S == 0].tolist()
    return seen


def test_past_a_rows_end_only_its_own_last_token_is_read() -> None:
    spans = [Span(num_tokens=1, context_len=100, pages=[0, 1]), Span(num_tokens=1, context_len=3, pages=[2])]
    view = PagedView.build(spans, page_size=64)
    (split,) = view.decode.splits
    assert split.places.view(2, -1)[1].tolist() == [128, 129] + [130] * 98


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span(num_tokens=0, context_len=3, pages=[0]), "0 tokens in a context of 3"),
        (Span(num_tokens=4, context_len=3, pages=[0]), "4 tokens in a context of 3"),
        (Span(num_tokens=1, context_len=17, pages=[0]), "a context of 17 on 1 pages of 16"),
    ],
)
def test_span_that_cannot_be_is_a_mistake(span: Span, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        PagedView.build([span], page_size=16)


def test_stale_latents_of_others_never_reach_a_result(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor]
) -> None:
    x = [hidden(21), hidden(5, seed=1)]
    steps = [[(0, 9), (1, 1)], [(0, 12), (1, 3)], [(1, 1)]]
    clean = rank_of(x).run(steps)
    poisoned = rank_of(x, poison=float("nan")).run(steps)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
