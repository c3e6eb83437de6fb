"""Pages and the paged view, against positions and places counted by hand or in a loop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import CacheFormat, LatentCache, PagedView, PageTable, Tiling
from attention_mla.splits import UNSEEN, DecodeRows, DecodeSplit
from tests.attention_mla.spans import Span, view_of

SMALL = CacheFormat(rank=3, rope_dim=2, dtype=torch.float32)
V3 = CacheFormat(rank=512, rope_dim=64, dtype=torch.bfloat16)


def test_row_bytes_are_those_of_deepseek_v3() -> None:
    assert (V3.row_bytes, replace(V3, fp8=True).row_bytes) == (1152, 656)
    assert LatentCache(2, 3, 64, replace(V3, fp8=True)).pages.shape == (2, 3, 64, 656)


def test_latents_land_on_their_page_and_place_minus_one_is_skipped() -> None:
    cache = LatentCache(2, 3, 4, SMALL)
    cache.pages.zero_()
    latents_TW = torch.arange(20.0).view(4, 5) + 1
    cache.append(1, latents_TW, torch.tensor([9, -1, 0, -1]))
    expected = torch.zeros(2, 3, 4, 5)
    expected[1, 2, 1] = latents_TW[0]
    expected[1, 0, 0] = latents_TW[2]
    assert torch.equal(cache.pages, expected)
    assert torch.equal(cache.rows(1).take(torch.tensor([9])), latents_TW[:1])


def test_appending_nothing_changes_nothing() -> None:
    cache = LatentCache(1, 2, 4, SMALL)
    cache.pages.zero_()
    cache.append(0, torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert not cache.pages.any()


def test_view_places_a_decode_row_and_a_prompt_by_hand() -> None:
    view = view_of(
        [Span(num_tokens=1, context_len=6, pages=[7, 2]), Span(num_tokens=3, context_len=5, pages=[1, 4])],
        page_size=4,
        max_absorbed_tokens=2,
    )
    assert view.positions_T.tolist() == [5, 2, 3, 4]
    assert view.places_T.tolist() == [2 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 4 * 4 + 0]
    assert view.decode.tokens_R.tolist() == [0]
    (split,) = view.decode.splits
    assert places_of(view.decode, split) == [[28, 29, 30, 31, 8, 9]]
    assert split.unseen_E1S is not None
    assert split.unseen_E1S.tolist() == [[[False] * 6]]
    (prompt,) = view.prompts
    assert prompt.tokens == slice(1, 4)
    (chunk,) = prompt.chunks
    assert chunk.places_S.tolist() == [4, 5, 6, 7, 16]
    (bias_QS,) = chunk.biases
    assert bias_QS is not None
    assert (bias_QS == UNSEEN).int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_short_span_becomes_one_decode_row_a_token_with_its_own_context() -> None:
    spans = [Span(num_tokens=3, context_len=10, pages=[5]), Span(num_tokens=1, context_len=9, pages=[6])]
    view = view_of(spans, page_size=16, tiling=Tiling(split_tokens=8))
    # Contexts 8, 9, 10 and 9; the longest first, ties in token order.
    assert view.decode.tokens_R.tolist() == [2, 1, 3, 0]
    assert view.prompts == ()
    first, second = view.decode.splits
    assert (first.num_rows, second.num_rows) == (4, 3)
    assert places_of(view.decode, first) == [list(range(start, start + 8)) for start in (80, 80, 96, 80)]
    assert places_of(view.decode, second) == [[88, 89], [88, 89], [104, 105]]
    assert first.unseen_E1S is not None  # of the last row alone, which fills the split
    assert first.unseen_E1S.tolist() == [[[False] * 8]]
    assert second.unseen_E1S is not None
    assert second.unseen_E1S.int().tolist() == [[[0, 0]], [[0, 1]], [[0, 1]]]


def test_empty_view_is_ordinary() -> None:
    view = view_of([], page_size=16)
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
    view = view_of(spans, page_size=page_size, tiling=tiling)

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
    assert all(split.num_positions <= tiling.split_tokens for split in view.decode.splits)


def places_of(rows: DecodeRows, split: DecodeSplit) -> list[list[int]]:
    """What each row of a split gathers."""
    places = split.blocks.unsqueeze(1) * rows.block_size + torch.arange(rows.block_size)
    return places.view(split.num_rows, -1)[:, : split.num_positions].tolist()


def attended_by_rows(view: PagedView) -> list[list[int]]:
    seen: list[list[int]] = [[] for _ in range(view.decode.num_rows)]
    for split in view.decode.splits:
        unseen_RS = torch.zeros(split.num_rows, split.num_positions, dtype=torch.bool)
        if split.unseen_E1S is not None:
            unseen_RS[-len(split.unseen_E1S) :] = split.unseen_E1S.squeeze(1)
        for row, places in enumerate(places_of(view.decode, split)):
            seen[row] += [place for place, unseen in zip(places, unseen_RS[row].tolist(), strict=True) if not unseen]
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


def test_blocks_are_as_long_as_page_and_split_allow() -> None:
    # Pages of 64, splits of 96: the example of the module.
    view = view_of([Span(num_tokens=1, context_len=80, pages=[3, 5])], page_size=64, tiling=Tiling(split_tokens=96))
    (split,) = view.decode.splits
    assert (view.decode.block_size, split.num_positions) == (32, 80)
    assert split.blocks.tolist() == [6, 7, 10]


def test_a_page_is_cleared_in_the_step_that_begins_it_but_not_where_that_fills_it() -> None:
    spans = [
        Span(num_tokens=1, context_len=5, pages=[7, 2]),  # begins page 2
        Span(num_tokens=1, context_len=6, pages=[8, 3]),  # goes on in page 3
        Span(num_tokens=6, context_len=10, pages=[9, 4, 1]),  # fills page 4, begins page 1
        Span(num_tokens=3, context_len=8, pages=[10, 5]),  # fills page 5 from its second place on
        Span(num_tokens=4, context_len=7, pages=[11, 6]),  # begins page 6 and leaves one place
    ]
    assert view_of(spans, page_size=4).cleared_J.tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 24, 25, 26, 27]


def test_what_earlier_steps_wrote_past_a_context_is_cleared() -> None:
    spans = [
        Span(num_tokens=1, context_len=6, pages=[7, 2, 5], written=9),  # three drafts were wrong, one on page 5
        Span(num_tokens=1, context_len=6, pages=[8, 3], written=5),
        Span(num_tokens=1, context_len=6, pages=[9, 4], written=6),  # launched again
        Span(num_tokens=1, context_len=6, pages=[10, 1], written=7),  # launched again, as is the step after it
    ]
    assert view_of(spans, page_size=4).cleared_J.tolist() == [10, 11, 20, 6]


def test_clearing_places_leaves_all_others_alone() -> None:
    cache = LatentCache(2, 3, 4, SMALL)
    cache.pages.fill_(1.0)
    cache.clear(1, torch.tensor([9, 0]))
    expected = torch.ones(2, 3, 4, 5)
    expected[1, 2, 1] = expected[1, 0, 0] = 0
    assert torch.equal(cache.pages, expected)
    cache.clear(1, torch.tensor([], dtype=torch.int64))
    assert torch.equal(cache.pages, expected)


def test_the_table_for_kernels_is_written_where_a_line_has_changed_and_nowhere_else() -> None:
    table = PageTable(3, 4, page_size=16)
    table.write(0, 0, [7, 5])
    table.write(2, 0, [6])
    assert table.on_device().tolist() == [[7, 5, 5, 5], [0, 0, 0, 0], [6, 6, 6, 6]]
    table.on_device()[0] = -1  # to see whether it is written again
    table.write(2, 1, [9, 8])
    assert table.on_device().tolist() == [[-1, -1, -1, -1], [0, 0, 0, 0], [6, 9, 8, 8]]
    assert table.pages_SG.tolist() == [[7, 5, 5, 5], [0, 0, 0, 0], [6, 9, 8, 8]]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span(num_tokens=0, context_len=3, pages=[0]), "0 tokens in a context of 3"),
        (Span(num_tokens=4, context_len=3, pages=[0]), "4 tokens in a context of 3"),
        (Span(num_tokens=1, context_len=33, pages=[0]), "1 tokens in a context of 33, room for 32"),
    ],
)
def test_span_that_cannot_be_is_a_mistake(span: Span, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        view_of([span], page_size=16)


def test_stale_latents_of_others_never_reach_a_result(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor]
) -> None:
    x = [hidden(70), hidden(8, seed=1)]
    # The longer of two decode rows says how far both are read.
    steps = [[(0, 9), (1, 1)], [(0, 50)], [(0, 1), (1, 1)], [(0, 3), (1, 3)], [(1, 1), (0, 1)], [(1, 1), (0, 5)]]
    clean = rank_of(x).run(steps)
    poisoned = rank_of(x, poison=float("nan")).run(steps)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_what_a_step_left_that_was_taken_back_never_reaches_a_result(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor]
) -> None:
    x, longer, nan = hidden(40), hidden(70, seed=1), torch.full((7, 24), torch.nan, dtype=torch.float64)
    begin, after = [(0, 9), (1, 60)], [[(0, 1), (1, 1)], [(0, 3)], [(0, 1), (1, 1)], [(0, 16), (1, 1)]]
    expected, _ = rank_of([x, longer]).run([begin, *after])
    rank = rank_of([x, longer], poison=float("nan"))
    first, _ = rank.step(begin)
    rank.inputs = [torch.cat((x[:9], nan[:3], nan, x[19:])), longer]
    rank.step([(0, 3)])  # as wrong drafts, or as a step that is run again
    rank.step([(0, 7)])  # reaches into the second page of 16
    rank.inputs, rank.done[0] = [x, longer], 9
    rest, _ = rank.run(after)
    assert torch.equal(torch.cat((first, rest)), expected)


def test_a_row_is_not_touched_by_a_later_one_of_its_span(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor], assert_near: Callable[..., None]
) -> None:
    x = hidden(12)
    [alone] = rank_of([x]).run([[(0, 9)], [(0, 1)]])
    wrong = torch.cat((x[:10], torch.full((2, 24), torch.nan, dtype=torch.float64)))
    [drafted] = rank_of([wrong]).run([[(0, 9)], [(0, 3)]])
    assert_near(drafted[:10], alone, 1e-12)
