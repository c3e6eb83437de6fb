"""Absorbed decode attention in Triton's interpreter against a float64 loop over requests, tokens and heads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from attention_mla import PagedView
from attention_mla.decode_kernels import attend, page_block
from attention_mla.latent_rows import LatentRows, fp8_row_bytes
from attention_mla.merge_kernels import merge_splits
from attention_mla.work_kernels import Scratch, Work, plan_work
from tests.attention_mla.spans import Span, view_of

pytestmark = pytest.mark.interpret

PAGE = 64
BORDERS = (1, 63, 64, 65, 200)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests of (context, tokens, name) over one cache whose unused places are NaN; a name fixes all numbers."""

    requests: Sequence[tuple[int, int, int]]
    heads: int
    rank: int = 32
    rope_dim: int = 16
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    page_size: int = PAGE
    split_tokens: int = 64
    num_programs: int = 3
    seed: int = 0

    @property
    def scale(self) -> float:
        return (self.rank + self.rope_dim) ** -0.5

    def numbers(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def context(self, request: int) -> Tensor:
        """The latents [S, W] of one request; a longer context begins with the same."""
        context, _, name = self.requests[request]
        return self.numbers(max(context, 512), self.rank + self.rope_dim, seed=name)[:context]

    def queries(self, request: int) -> tuple[Tensor, Tensor]:
        """Of its tokens: the last of the context, each with numbers of its own."""
        context, tokens, name = self.requests[request]
        whole = self.numbers(max(context, 512), self.heads, self.rank + self.rope_dim, seed=name + 500)
        return whole[context - tokens : context].split((self.rank, self.rope_dim), dim=-1)

    def view(self) -> PagedView:
        counts = [-(-context // self.page_size) for context, _, _ in self.requests]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
        pages = [order[sum(counts[:n]) : sum(counts[: n + 1])] for n in range(len(counts))]
        spans = [Span(num_tokens=t, context_len=c, pages=p) for (c, t, _), p in zip(self.requests, pages, strict=True)]
        return view_of(spans, page_size=self.page_size)

    def rows(self, view: PagedView) -> LatentRows:
        num_rows = (view.absorbed.pages_G.shape[0]) * self.page_size + 1
        if self.fp8:
            width = fp8_row_bytes(self.rank, self.rope_dim)
            stored = torch.full((num_rows, width), 0x7F, dtype=torch.uint8)  # 0x7f is NaN in e4m3
            rows = LatentRows.fp8(stored, rank=self.rank, rope_dim=self.rope_dim)
            assert rows.scales_NG is not None
            rows.scales_NG.fill_(torch.nan)
            rows.rope_NP.fill_(torch.nan)
        else:
            stored = torch.full((num_rows, self.rank + self.rope_dim), torch.nan, dtype=self.dtype)
            rows = LatentRows.plain(stored, self.rank)
        requests = view.absorbed
        for request, (context, _, _) in enumerate(self.requests):
            positions = torch.arange(context)
            page = requests.pages_G[requests.first_page_B[request] + positions // self.page_size]
            rows.write(self.context(request), page * self.page_size + positions % self.page_size)
        return rows


def run(case: Case) -> Tensor:
    """[T, H, C], over outputs and scratch that were NaN."""
    view = case.view()
    requests, rows = view.absorbed, case.rows(view)
    queries = [case.queries(request) for request in range(len(case.requests))]
    absorbed_THC = torch.cat([c for c, _ in queries] or [case.numbers(0, case.heads, case.rank, seed=0)])
    rope_THP = torch.cat([p for _, p in queries] or [case.numbers(0, case.heads, case.rope_dim, seed=0)])
    work = Work.room_for(requests, num_heads=case.heads, split_tokens=case.split_tokens)
    scratch = Scratch.room_for(work, case.rank, case.dtype)
    out_THC = torch.full(absorbed_THC.shape, torch.nan, dtype=case.dtype)
    scratch.mean_IMC.fill_(torch.nan)
    scratch.lse_IM.fill_(torch.nan)
    work.request_I.fill_(1 << 30)
    plan_work(requests, work)
    attend(
        absorbed_THC,
        rope_THP,
        rows,
        requests=requests,
        work=work,
        page_size=case.page_size,
        score_scale=case.scale,
        num_programs=case.num_programs,
        scratch=scratch,
        out_THC=out_THC,
    )
    merge_splits(scratch, requests=requests, work=work, out_THC=out_THC)
    return out_THC


def expected(case: Case) -> Tensor:
    """[T, H, C] in float64, one token at a time, of what the cache holds."""
    outputs = []
    for request, (context, tokens, _) in enumerate(case.requests):
        latents_SW = case.context(request).double()
        if case.fp8:
            stored = torch.zeros(context, fp8_row_bytes(case.rank, case.rope_dim), dtype=torch.uint8)
            rows = LatentRows.fp8(stored, rank=case.rank, rope_dim=case.rope_dim)
            rows.write(case.context(request), torch.arange(context))
            latents_SW = rows.read(case.dtype).double()
        absorbed_THC, rope_THP = case.queries(request)
        for token in range(tokens):
            seen_SW = latents_SW[: context - tokens + token + 1]
            query_HW = torch.cat((absorbed_THC[token], rope_THP[token]), dim=-1).double()
            shares_HS = (query_HW @ seen_SW.T * case.scale).softmax(dim=-1)
            outputs.append(shares_HS @ seen_SW[:, : case.rank])
    return torch.stack(outputs) if outputs else torch.zeros(0, case.heads, case.rank, dtype=torch.float64)


def assert_close(case: Case) -> None:
    """Cosine distance, and the worst element in units in the last place of its row's largest magnitude."""
    actual, wanted = run(case).double(), expected(case)
    assert actual.shape == wanted.shape
    if not wanted.numel():
        return
    assert bool(actual.isfinite().all()), f"{int((~actual.isfinite()).sum())} of {actual.numel()} are not finite"
    cosine = torch.nn.functional.cosine_similarity(actual.flatten(), wanted.flatten(), dim=0)
    assert float(1 - cosine) < 1e-5
    _, exponent = torch.frexp(wanted.abs().amax(dim=-1, keepdim=True))
    unit = max(torch.finfo(case.dtype).eps, 2.0**-19) * 2.0 ** (exponent - 1)
    error = (actual - wanted).abs() / unit
    assert float(error.max()) <= 2, f"off by {float(error.max()):.2f} units at {int(error.argmax())}"


def test_the_docstrings_numbers_come_out():
    stored = torch.zeros(65, 32)
    stored[:2, 0] = torch.tensor([0.0, 1.0])
    stored[:2, 16] = 9.0
    view = view_of([Span(num_tokens=1, context_len=2, pages=[0])], page_size=64)
    query = torch.zeros(1, 1, 16)
    query[0, 0, 0] = 1.0
    work = Work.room_for(view.absorbed, num_heads=1, split_tokens=64)
    scratch, out = Scratch.room_for(work, 16, torch.float32), torch.full((1, 1, 16), torch.nan)
    plan_work(view.absorbed, work)
    attend(
        query,
        torch.zeros(1, 1, 16),
        LatentRows.plain(stored, 16),
        requests=view.absorbed,
        work=work,
        page_size=64,
        score_scale=torch.tensor(2.0).log().item(),
        num_programs=1,
        scratch=scratch,
        out_THC=out,
    )
    assert out[0, 0, 0].item() == pytest.approx(2 / 3, rel=1e-6)


@pytest.mark.parametrize("context", BORDERS)
@pytest.mark.parametrize("heads", [3, 20])
def test_one_token_attends_to_contexts_around_page_and_split_borders(context: int, heads: int):
    assert_close(Case(requests=[(context, 1, 1)], heads=heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_run_dtype_stays_within_two_units_of_float64(dtype: torch.dtype):
    assert_close(Case(requests=[(65, 1, 1), (1, 1, 2), (130, 2, 3)], heads=5, dtype=dtype))


def test_fp8_rows_are_read_back_within_rounding_of_what_they_hold():
    assert_close(Case(requests=[(65, 1, 1), (3, 3, 2), (140, 2, 3)], heads=4, rank=256, dtype=torch.bfloat16, fp8=True))


@pytest.mark.parametrize("context", [1, 63, 64, 65])
def test_fp8_rows_around_page_and_split_borders(context: int):
    assert_close(Case(requests=[(context, 1, 1)], heads=3, rank=128, dtype=torch.bfloat16, fp8=True))


def test_a_row_over_fp8_does_not_depend_on_its_batch_mates():
    case = Case(requests=[(7, 2, 1), (130, 1, 8)], heads=3, rank=128, dtype=torch.bfloat16, fp8=True, num_programs=2)
    alone = run(replace(case, requests=[(130, 1, 8)], num_programs=1))
    assert torch.equal(alone[0], run(case)[2])


def test_a_long_context_is_merged_from_many_splits():
    assert_close(Case(requests=[(4097, 1, 1)], heads=1, split_tokens=512, rank=16))


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_several_tokens_of_a_request_each_see_up_to_themselves(tokens: int):
    # At 66 with 4 tokens the first stands before the split that the last reaches into.
    assert_close(Case(requests=[(66, tokens, 1), (tokens, tokens, 2), (192, tokens, 3)], heads=5))


def test_sizes_that_are_no_powers_of_two_and_small_pages():
    assert_close(Case(requests=[(100, 1, 1), (17, 2, 2)], heads=7, rank=12, rope_dim=6, page_size=48, split_tokens=96))


def test_no_requests_are_an_ordinary_step():
    assert run(Case(requests=[], heads=3)).shape == (0, 3, 32)


@pytest.mark.parametrize("padding", ["no context", "no tokens"])
def test_padding_has_no_items_and_writes_nothing(padding: str):
    case = Case(requests=[(65, 1, 1), (70, 1, 2), (1, 1, 3)], heads=3)
    requests = case.view().absorbed
    lengths = requests.context_B if padding == "no context" else requests.num_tokens_B
    lengths[1] = 0
    work = Work.room_for(requests, num_heads=3, split_tokens=64)
    plan_work(requests, work)
    assert work.first_item_B.tolist() == [0, 2, 2, 3]
    assert work.request_I[:3].tolist() == [0, 0, 2]


def test_the_plan_lists_the_docstrings_items():
    requests = Case(requests=[(300, 1, 1), (1, 1, 2), (128, 2, 3)], heads=4).view().absorbed
    requests = replace(requests, context_B=torch.tensor([300, 0, 128]))
    work = Work.room_for(requests, num_heads=4, split_tokens=128)
    plan_work(requests, work)
    assert work.first_item_B.tolist() == [0, 3, 3, 4]  # 8 rows fit into one tile of 16
    assert work.request_I[:4].tolist() == [0, 0, 0, 2]
    many = Work.room_for(requests, num_heads=40, split_tokens=128)
    plan_work(requests, many)
    assert many.first_item_B.tolist() == [0, 3, 3, 5]  # 40 heads take a tile of 64 each


def test_a_row_does_not_depend_on_its_batch_mates_nor_on_the_number_of_programs():
    alone = run(Case(requests=[(130, 1, 8)], heads=20, dtype=torch.bfloat16))
    among = run(Case(requests=[(7, 2, 1), (130, 1, 8), (300, 3, 2)], heads=20, dtype=torch.bfloat16, num_programs=5))
    assert torch.equal(alone[0], among[2])


@pytest.fixture
def level_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's dots summed in float64: a CPU's matmul may round a row by where it stands in its block."""

    def dot(_, left, right, total, *__):
        product = np.matmul(left.data, right.data, dtype=np.float64)
        return interpreter.TensorHandle((product + total.data).astype(total.data.dtype), total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("level_dots")
def test_a_token_among_several_of_its_request_gets_what_it_would_get_alone():
    together = run(Case(requests=[(66, 4, 8)], heads=5))
    alone = [run(Case(requests=[(context, 1, 8)], heads=5)) for context in (63, 64, 65, 66)]
    assert torch.equal(torch.cat(alone), together)


def test_a_page_that_no_block_divides_is_refused():
    assert [page_block(size) for size in (64, 128, 96, 16)] == [64, 64, 32, 16]
    with pytest.raises(ValueError, match=r"block_size is 24; .* multiple of 16, e.g. 64"):
        page_block(24)
