"""Pending is a value that is fetched once; the transport of threads passes what any transport must."""

from __future__ import annotations

import pytest
import torch

from ep import Kind, Pending, Tag, run_ranks
from ep.conformance import check_transport
from ep.transport import assert_fit
from ep.wrapping import Wrapping


def test_a_pending_is_finished_once_however_often_it_is_waited_for():
    calls = []
    pending = Pending(lambda: calls.append("finish") or object())
    assert pending.wait() is pending.wait()
    assert calls == ["finish"]


def test_a_pending_of_none_is_finished_once_too():
    calls = []
    pending = Pending(lambda: calls.append("finish"))
    assert pending.wait() is None
    assert pending.wait() is None
    assert calls == ["finish"]


def test_what_follows_runs_once_and_only_when_waited_for():
    calls = []
    doubled = Pending.ready(21).then(lambda value: calls.append("then") or 2 * value)
    assert calls == []
    assert doubled.wait() == doubled.wait() == 42
    assert calls == ["then"]


def test_a_pending_that_failed_fails_again():
    def fail() -> int:
        raise OSError("gone")

    pending = Pending(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            pending.wait()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_threads_pass_what_any_transport_must(size):
    run_ranks(size, check_transport, timeout_s=20)


def test_threads_in_inference_mode_pass_too():
    def check(transport):
        with torch.inference_mode():
            check_transport(transport)

    run_ranks(3, check, timeout_s=20)


def test_ranks_in_and_out_of_inference_mode_exchange_with_each_other():
    def check(transport):
        with torch.inference_mode(transport.rank == 1):
            check_transport(transport)

    run_ranks(3, check, timeout_s=20)


class Faulty(Wrapping):
    """A transport that passes calls on and spoils what comes of them."""

    def __init__(self, inner, spoil):
        super().__init__(inner)
        self._spoil = spoil

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        pending = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return pending.then(self._spoil)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows.flip(0), r"all_to_all, uniform: at \(0, 0\)"),
        (lambda rows: rows.to(torch.float32).to(rows.dtype), r"all_to_all, torch\.float64: at"),
        (lambda rows: rows.clone(), None),
    ],
    ids=["misordered", "narrowed", "copied"],
)
def test_the_check_finds_rows_out_of_order_and_rows_made_narrower(spoil, message):
    def check(transport):
        check_transport(Faulty(transport, spoil))

    if message is None:
        run_ranks(3, check, timeout_s=20)
        return
    with pytest.raises(AssertionError, match=message):
        run_ranks(3, check, timeout_s=20)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"send_splits": [2, 1]}, r"\(\[2, 1\], torch\.Size\(\[2, 3\]\)\)"),
        ({"recv_splits": [0, 1]}, r"\(\[0, 1\], torch\.Size\(\[2, 3\]\)\)"),
        ({"recv_splits": [2]}, r"\(\[1, 1\], \[2\], 2\)"),
        ({"recv": torch.zeros(2, 3, dtype=torch.float64)}, r"\(torch\.float32, torch\.float64\)"),
        ({"recv": torch.zeros(2, 4)}, r"\(torch\.Size\(\[2, 3\]\), torch\.Size\(\[2, 4\]\)\)"),
    ],
)
def test_rows_and_splits_that_do_not_fit_are_told_with_their_sizes(wrong, words):
    right = {"recv": torch.zeros(2, 3), "send": torch.zeros(2, 3), "recv_splits": [1, 1], "send_splits": [1, 1]}
    assert_fit(**right, size=2)
    with pytest.raises(AssertionError, match=words):
        assert_fit(**right | wrong, size=2)


def test_a_tag_reads_like_a_place():
    assert str(Tag(3, 1, 0, 2, Kind.COMBINE)) == "COMBINE(step 3, layer 1, track 0, round 2)"
