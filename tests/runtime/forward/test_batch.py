"""Rows to tensors, against a loop over rows and positions; and what the request table is told, and when."""

import random
from collections.abc import Sequence

import pytest
import torch

from runtime.forward.batch import RequestTable, StepBatch
from runtime.requests.request import Request
from runtime.requests.rows import Row, Rows
from runtime.requests.sampling_params import SamplingParams

CPU = torch.device("cpu")


def request(name: str, *, slot: int, pages: Sequence[int], num_tokens: int = 3) -> Request:
    made = Request(id=name, prompt=tuple(range(10 * slot, 10 * slot + num_tokens)), params=SamplingParams(), arrival=0)
    made.slot, made.pages = slot, list(pages)
    return made


def table(*, page_size: int, num_slots: int = 8, max_len: int = 64) -> RequestTable:
    return RequestTable(num_slots, max_len, page_size=page_size, device=CPU)


def admit(to: RequestTable, *rows: Row) -> None:
    to.admit(Rows.of(rows))


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_batch_agrees_with_a_loop_over_rows(page_size: int):
    numbers = random.Random(page_size)
    to, pages, rows = table(page_size=page_size), iter(numbers.sample(range(1000), 600)), []
    for slot in range(8):
        there = request(str(slot), slot=slot, pages=[next(pages) for _ in range(-(-60 // page_size))], num_tokens=40)
        start = numbers.choice([0, page_size, 2 * page_size, 17, 18])
        admit(to, Row(there, 0, max(start, 1), 0, False))
        there.drafts = [501, 502, 503]
        num_drafts = slot % 3 if slot != 5 else 0
        rows.append(Row(there, start, num_drafts + numbers.choice([1, 1, 7]), num_drafts, slot != 5))
    batch = StepBatch.build(Rows.of(rows), to)

    tokens = [(row, position) for row in rows for position in range(row.start, row.end)]
    assert batch.view.slots_T.tolist() == [row.request.slot for row, _ in tokens]
    assert batch.view.positions_T.tolist() == [position for _, position in tokens]
    assert batch.view.places_T.tolist() == [
        row.request.pages[position // page_size] * page_size + position % page_size for row, position in tokens
    ]
    sampled = [
        (index, row, position)
        for index, (row, position) in enumerate(tokens)
        if row.samples and position >= row.end - 1 - row.num_drafts
    ]
    assert batch.logit_rows_B.tolist() == [index for index, _, _ in sampled]
    assert batch.slots_B.tolist() == [row.request.slot for _, row, _ in sampled]
    assert batch.positions_B.tolist() == [position + 1 for _, _, position in sampled]
    for row in rows:
        line = to.tokens[row.request.slot, row.end - row.num_drafts : row.end].tolist()
        assert line == row.request.drafts[: row.num_drafts]


def test_no_rows_are_an_ordinary_batch():
    batch = StepBatch.build(Rows.of(()), table(page_size=16))
    assert (batch.view.num_tokens, len(batch.logit_rows_B), len(batch.slots_B), batch.view.prompts) == (0, 0, 0, ())


def test_a_request_is_written_whole_when_it_enters_a_slot_and_its_pages_as_it_begins_them():
    to, one = table(page_size=4, num_slots=2, max_len=16), request("a", slot=1, pages=[9, 7, 8], num_tokens=6)
    admit(to, Row(one, 0, 5, 0, False))
    assert to.tokens[1, :6].tolist() == [10, 11, 12, 13, 14, 15]
    assert to.pages.pages_SG.tolist() == [[0, 0, 0, 0], [9, 7, 7, 7]]
    one.tokens[5] = 99  # to see whether it is written again
    admit(to, Row(one, 5, 3, 0, True))
    assert to.pages.pages_SG[1].tolist() == [9, 7, 7, 7]
    admit(to, Row(one, 8, 1, 0, True))
    assert to.pages.pages_SG[1].tolist() == [9, 7, 8, 8]
    assert to.tokens[1, 5] == 15


def test_what_lay_in_the_prefix_cache_is_written_with_the_first_row():
    to, one = table(page_size=4), request("a", slot=2, pages=[9, 7, 8], num_tokens=9)
    admit(to, Row(one, 8, 1, 0, True))
    assert to.pages.pages_SG[2, :4].tolist() == [9, 7, 8, 8]
    assert to.tokens[2, :9].tolist() == one.tokens


def test_a_preempted_request_is_written_again_even_into_the_slot_it_had():
    to, one = table(page_size=4), request("a", slot=2, pages=[9, 7], num_tokens=6)
    admit(to, Row(one, 0, 6, 0, True))
    one.tokens.append(77)
    one.pages = [3, 1]  # a new list, as the roster gives one whenever it admits
    admit(to, Row(one, 0, 7, 0, True))
    assert to.pages.pages_SG[2, :3].tolist() == [3, 1, 1]
    assert to.tokens[2, :7].tolist() == one.tokens


def test_steps_that_are_launched_again_in_order_find_the_table_and_the_cache_as_they_were():
    to, one = table(page_size=4), request("a", slot=0, pages=[9, 7, 8, 5], num_tokens=8)
    StepBatch.build(Rows.of([Row(one, 0, 6, 0, False)]), to)
    steps = [Row(one, 6, 1, 0, False), Row(one, 7, 1, 0, True), Row(one, 8, 1, 0, True)]
    views = [StepBatch.build(Rows.of([row]), to).view for row in [*steps, *steps]]
    assert [view.places_T.tolist() for view in views] == [[30], [31], [32], [30], [31], [32]]
    # Of places 30 to 32, the page of 32 is cleared when it is begun, the others when an earlier step comes again.
    assert [view.cleared_J.tolist() for view in views] == [[], [], [32, 33, 34, 35], [31, 32], [32], [32, 33, 34, 35]]


def test_what_wrong_drafts_left_in_the_cache_is_cleared():
    to, one = table(page_size=4), request("a", slot=0, pages=[9, 7], num_tokens=4)
    one.drafts = [501, 502]
    first = StepBatch.build(Rows.of([Row(one, 0, 4, 0, True)]), to).view
    drafted = StepBatch.build(Rows.of([Row(one, 4, 3, 2, True)]), to).view
    after = StepBatch.build(Rows.of([Row(one, 5, 1, 0, True)]), to).view
    assert first.cleared_J.tolist() == [36, 37, 38, 39]
    assert drafted.cleared_J.tolist() == [28, 29, 30, 31]
    assert (after.places_T.tolist(), after.cleared_J.tolist()) == ([29], [30])


def test_a_row_beyond_its_pages_is_a_mistake():
    with pytest.raises(AssertionError, match="a context of 9 on 2 pages"):
        admit(table(page_size=4), Row(request("a", slot=0, pages=[1, 2], num_tokens=9), 0, 9, 0, True))


def test_a_request_without_a_slot_is_a_mistake():
    one = request("a", slot=0, pages=[1])
    one.slot = None
    with pytest.raises(TypeError):
        StepBatch.build(Rows.of([Row(one, 0, 3, 0, True)]), table(page_size=4))
