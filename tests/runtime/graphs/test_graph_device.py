"""Recorded work is done again on the same memory, and what cannot be recorded says so."""

from __future__ import annotations

import pytest
import torch

from runtime.graphs.graph_device import Recording
from tests.runtime.pretend_graphs import HostTouched, PretendGraphs


def record(work, step=None):
    return Recording(PretendGraphs()).record(work, step)


def test_a_replay_sees_what_lies_in_memory_now():
    x, table = torch.tensor([1.0, 2.0]), torch.zeros(4)
    place = torch.tensor([1])

    def work():
        y = (x * 2).reshape(1, 2).sum(dim=0)
        table.index_add_(0, place, y[:1])
        return y + 1

    program = record(work)
    assert program.value.tolist() == [3.0, 5.0]
    x.copy_(torch.tensor([10.0, 20.0]))
    place.fill_(3)
    assert program.replay(None).tolist() == [21.0, 41.0]
    assert table.tolist() == [0.0, 2.0, 0.0, 20.0]


def test_numbers_of_the_host_are_burnt_in():
    x, scale = torch.ones(2), [2.0]
    program = record(lambda: x * scale[0])
    scale[0] = 5.0
    assert program.replay(None).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: torch.bincount(x.long()),
    ],
    ids=["item", "tolist", "numpy", "bool", "int", "nonzero", "mask", "tensor", "bincount"],
)
def test_what_the_host_touches_cannot_be_recorded(touch):
    x = torch.tensor([1.0, 2.0])
    device = PretendGraphs()
    with pytest.raises(HostTouched):
        Recording(device).record(lambda: touch(x), None)
    assert touch(x) is not None  # and outside of a recording all is as before


def test_switch_points_cut_a_program_and_get_the_step_that_is_replayed():
    x, between, seen = torch.ones(2), torch.zeros(2), []
    device = PretendGraphs()
    recording = Recording(device)

    def outside(step):
        seen.append(step)
        between.copy_(doubled * step)

    def work():
        nonlocal doubled
        doubled = x * 2
        recording.outside(outside)
        return between + 1

    doubled = torch.empty(0)
    program = recording.record(work, 3)
    assert (len(program.parts), device.num_graphs) == (3, 2)
    assert program.value.tolist() == [7.0, 7.0]
    x.fill_(2.0)
    assert program.replay(5).tolist() == [21.0, 21.0]
    assert seen == [3, 5]


def test_a_rehearsal_does_what_is_recorded_afterwards_and_records_nothing():
    x, seen, device = torch.ones(2), [], PretendGraphs()
    recording = Recording(device)

    def work():
        recording.outside(seen.append)
        return x * 2

    recording.rehearse(work, 3)
    assert (seen, device.num_graphs) == ([3], 0)
    assert len(recording.record(work, 4).parts) == 3
    assert seen == [3, 4]


@pytest.mark.interpret
def test_launches_of_kernels_are_recorded():
    from attention_mla import attention_ops

    ops, x_TD, weight_D = attention_ops("triton"), torch.ones(3, 8), torch.ones(8)
    program = record(lambda: ops.norm(x_TD, weight_D, 1e-6) * 2)
    x_TD[1] = torch.arange(8)
    wanted = attention_ops("reference").norm(x_TD, weight_D, 1e-6) * 2
    assert program.replay(None) == pytest.approx(wanted)
