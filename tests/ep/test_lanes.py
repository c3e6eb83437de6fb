"""Lanes change when things run, never what arrives; on a GPU an exchange runs beside what is computed meanwhile."""

from __future__ import annotations

import pytest
import torch

from ep import Kind, Pending, Tag, run_ranks
from ep.conformance import check_transport
from ep.lanes import LANES, LanedTransport

TAG = Tag(0, 0, 0, 0, Kind.CHECK)


def test_on_a_cpu_a_laned_transport_passes_what_any_transport_must():
    lanes = LANES["cpu"](torch.device("cpu"))
    run_ranks(3, lambda transport: check_transport(LanedTransport(transport, lanes)), timeout_s=20.0)


def test_on_a_cpu_what_is_started_is_handed_on_as_it_is():
    pending = Pending.ready(7)
    assert LANES["cpu"](torch.device("cpu")).start(lambda: pending, torch.zeros(1), tag=TAG) is pending


class OnTheStream:
    """A transport of one rank that copies slowly on whatever stream is current."""

    rank, size = 0, 1

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        torch.cuda._sleep(200_000_000)
        recv.copy_(send)
        return Pending.ready(recv)


@pytest.mark.gpu
def test_on_a_gpu_the_compute_lane_goes_on_and_waits_only_when_told():
    device = torch.device("cuda", torch.cuda.current_device())
    transport = LanedTransport(OnTheStream(), LANES["cuda"](device))  # type: ignore[arg-type]
    send = torch.arange(1000.0, device=device)
    recv = torch.zeros_like(send)
    begin, computed, arrived = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    begin.record()
    pending = transport.all_to_all(recv, send, recv_splits=[1000], send_splits=[1000], tag=TAG)
    (send * 2).sum()
    computed.record()
    rows = pending.wait()
    arrived.record()
    torch.cuda.synchronize()
    assert torch.equal(rows, send)
    assert begin.elapsed_time(computed) < 0.5 * begin.elapsed_time(arrived)
