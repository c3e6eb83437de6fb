"""A vote on the wire, and what a rank says of its prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.requests.request import Request
from runtime.requests.rows import Proposal, Row, Rows
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduling.votes import PrefillWatch, Vote

MS = 1_000_000


def proposal(*rows: tuple[int, int, bool]) -> Proposal:
    """Rows as (start, num_tokens, samples); a row of one token that samples decodes."""
    request = Request(id="a", prompt=(1,), params=SamplingParams(), arrival=0)
    request.slot = 0
    made = tuple(Row(request, start, num_tokens, 0, samples) for start, num_tokens, samples in rows)
    prefill = sum(row.num_tokens for row in made if row.is_prefill)
    return Proposal(Rows.of(made), sum(row.num_tokens for row in made) - prefill, prefill)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=len(Vote._fields), max_size=len(Vote._fields)))
def test_a_vote_survives_the_wire(row: list[int]):
    assert Vote.from_row(row).row() == row


def test_a_row_of_another_length_is_refused():
    with pytest.raises(AssertionError, match=f"a vote has {len(Vote._fields)} fields, this row 3"):
        Vote.from_row([1, 2, 3])


def test_a_wait_begins_with_the_first_proposal_that_is_put_off():
    watch = PrefillWatch()
    prompts = proposal((0, 100, True))
    assert watch.vote(prompts, spare_tokens=9, now_ns=50 * MS).oldest_prefill_wait_ms == 0
    assert watch.vote(prompts, spare_tokens=9, now_ns=90 * MS).oldest_prefill_wait_ms == 40
    watch.committed(proposal((5, 1, True)).rows)  # a step of decodes only releases nothing
    assert watch.vote(prompts, spare_tokens=9, now_ns=91 * MS).oldest_prefill_wait_ms == 41
    watch.committed(prompts.rows)
    assert watch.vote(prompts, spare_tokens=9, now_ns=95 * MS).oldest_prefill_wait_ms == 0


def test_a_wait_ends_when_the_prompts_are_gone():
    watch = PrefillWatch()
    watch.vote(proposal((0, 100, True)), spare_tokens=9, now_ns=0)
    assert watch.vote(proposal(), spare_tokens=9, now_ns=70 * MS).oldest_prefill_wait_ms == 0
    assert watch.vote(proposal((0, 100, True)), spare_tokens=9, now_ns=80 * MS).oldest_prefill_wait_ms == 0


def test_a_rank_is_ready_when_its_budget_is_spent():
    assert not PrefillWatch().vote(proposal((0, 100, True)), spare_tokens=1, now_ns=0).prefill_ready
    assert PrefillWatch().vote(proposal((0, 100, False)), spare_tokens=0, now_ns=0).prefill_ready
    assert not PrefillWatch().vote(proposal((9, 1, True)), spare_tokens=0, now_ns=0).prefill_ready


def test_a_rank_is_ready_while_a_prompt_goes_on_that_a_release_cut():
    watch = PrefillWatch()
    watch.committed(proposal((0, 64, False)).rows)
    watch.committed(proposal((9, 1, True)).rows)
    assert watch.vote(proposal((64, 36, True)), spare_tokens=9, now_ns=0).prefill_ready
    watch.committed(proposal((64, 36, True)).rows)
    assert not watch.vote(proposal((0, 36, True)), spare_tokens=9, now_ns=0).prefill_ready


def test_start_and_context_come_from_the_rows():
    found = PrefillWatch().vote(
        proposal((40, 1, True), (9, 1, True), (64, 30, False), (7, 3, True)), spare_tokens=9, now_ns=0
    )
    assert (found.prefill_start, found.context_tokens) == (64, 41 + 10)
