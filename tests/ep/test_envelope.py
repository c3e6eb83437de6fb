"""A header survives the wire; letters that do not fit together name one culprit; last words keep their meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep import ExchangeMismatch, Kind, PeerFailed, Tag, TagMismatch, TransportError
from ep.envelope import (
    FORM_BYTES,
    HEADER_BYTES,
    Header,
    Sort,
    fault_of,
    find_fault,
    form_of,
    last_words,
    pack,
    unpack,
)

TAG = Tag(step=2**40, layer=3, track=1, round=2, kind=Kind.COMBINE)
FORM = form_of("all_to_all", torch.int64, torch.Size((3,)))
HEADER = Header(sort=Sort.ROWS, number=2**33, num_bytes=2**35, tag=TAG, form=FORM, num_read=7)


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        replace(HEADER, tag=Tag(-1, -2, -3, -4, 99), form=b"", num_bytes=0),  # type: ignore[arg-type]
        replace(HEADER, form=form_of("all_gather", torch.float8_e4m3fn, torch.Size(range(40)))),
        Header(sort=Sort.FAILED, culprit=63, number=5, num_bytes=2000),
        Header(sort=Sort.ENDED, number=5, num_bytes=0),
    ],
)
def test_a_header_survives_the_wire(header):
    packed = pack(header)
    assert len(packed) == HEADER_BYTES
    heard = unpack(memoryview(packed + b"payload"))
    assert heard == header
    assert heard.num_read == header.num_read
    assert type(heard.tag.kind) is type(header.tag.kind)


@pytest.mark.parametrize("letter", [b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES), bytes(HEADER_BYTES)])
def test_a_letter_without_a_header_is_refused_and_shown(letter):
    with pytest.raises(ValueError, match=r"a letter begins with b'.*', which is no header"):
        unpack(memoryview(letter))


def test_a_header_of_an_unknown_sort_is_refused():
    packed = bytearray(pack(HEADER))
    packed[4] = 77
    with pytest.raises(ValueError, match="no header"):
        unpack(memoryview(packed))


def test_a_form_says_operation_dtype_and_shape():
    assert FORM == b"all_to_all of torch.int64 [3]"
    assert len(form_of("all_gather", torch.float8_e4m3fn, torch.Size(range(40)))) == FORM_BYTES


def test_letters_that_fit_together_have_no_fault_whatever_was_read():
    heard = [HEADER, replace(HEADER, num_read=6), replace(HEADER, num_read=8)]
    assert find_fault(heard, [2**35] * 3, rank=0) is None


@pytest.mark.parametrize(("odd", "culprit"), [((2,), 2), ((0,), 0), ((0, 2), 1)])
def test_the_smaller_party_is_out_of_step(odd, culprit):
    other = TAG._replace(layer=4)
    heard = [replace(HEADER, tag=other if rank in odd else TAG) for rank in range(3)]
    error = find_fault(heard, [2**35] * 3, rank=1)(rank=1, step=5)
    assert isinstance(error, TagMismatch)
    assert error.culprit == culprit
    assert {error.expected, error.found} == {TAG, other}
    assert error.rank == 1


def test_another_form_is_a_mismatch_that_says_both():
    other = form_of("all_gather", torch.float64, torch.Size((3,)))
    heard = [HEADER, HEADER, replace(HEADER, form=other)]
    error = find_fault(heard, [2**35] * 3, rank=0)()
    assert isinstance(error, ExchangeMismatch)
    assert error.culprit == 2
    assert "expected all_to_all of torch.int64 [3], found all_gather of torch.float64 [3]" in str(error)


def test_another_count_is_a_mismatch_of_its_sender():
    heard = [replace(HEADER, num_bytes=count) for count in (8, 16, 8)]
    error = find_fault(heard, [8, 12, 8], rank=0)()
    assert isinstance(error, ExchangeMismatch)
    assert error.culprit == 1
    assert "rank 1 sends 16 bytes to rank 0, which expects 12" in str(error)


def test_a_rank_out_of_step_counts_before_what_its_rows_are():
    heard = [HEADER, replace(HEADER, tag=TAG._replace(step=1), form=b"other", num_bytes=1)]
    assert isinstance(find_fault(heard, [2**35] * 2, rank=0)(), TagMismatch)


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (PeerFailed(2, "raised ValueError: x"), PeerFailed(2, "raised ValueError: x")),
        (ExchangeMismatch(1, "TAG: 3 rows"), ExchangeMismatch(1, "TAG: 3 rows")),
        (TagMismatch(3, TAG, TAG), PeerFailed(3, f"is out of step: expected {TAG}, found {TAG}")),
        (TransportError("no more"), PeerFailed(0, "failed: no more")),
    ],
)
def test_last_words_mean_the_same_to_those_who_are_told(error, means):
    sort, culprit, words = last_words(error, rank=0)
    header = Header(sort=sort, culprit=culprit, number=4, num_bytes=len(words))
    told = fault_of(header, words, sender=0, reader=5, needs=TAG)()
    assert (type(told), str(told), told.culprit) == (type(means), str(means), means.culprit)


def test_a_rank_that_ended_is_the_culprit_for_who_needs_it():
    header = Header(sort=Sort.ENDED, number=4, num_bytes=0)
    told = fault_of(header, "", sender=3, reader=5, needs=TAG)()
    assert isinstance(told, PeerFailed)
    assert str(told) == f"rank 3 ended after 4 exchanges; rank 5 needs it in {TAG}"
