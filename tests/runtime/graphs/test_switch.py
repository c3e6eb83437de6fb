"""What is under way between pieces is begun and waited for outside of them, whatever carries it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep import Kind, Pending, Tag
from ep.lanes import NoLanes
from runtime.graphs.graph_device import Recording
from runtime.graphs.switch import PieceStep, Switch
from tests.runtime.pretend_graphs import PretendGraphs

CPU = torch.device("cpu")
TAG = Tag(7, 0, 0, 0, Kind.DISPATCH)
STEP = PieceStep(number=7, views=(), plans=())


class Carrier:
    """Doubles what lies in `out` into `into`, on whichever of the two ways; notes whether a graph was open then."""

    rank, size = 0, 1

    def __init__(self, device: PretendGraphs) -> None:
        self.out, self.into = torch.zeros(2), torch.zeros(2)
        self.in_graph: list[bool] = []
        self._device = device

    def carry(self) -> Pending[torch.Tensor]:
        self.in_graph.append(self._device.graph is not None)
        self.into.copy_(self.out * 2)
        return Pending(self._landed)

    def all_to_all(self, recv: Any, send: Any, *, recv_splits: Any, send_splits: Any, tag: Tag) -> Any:
        return self.carry()

    def _landed(self) -> torch.Tensor:
        self.in_graph.append(self._device.graph is not None)
        return self.into


@pytest.mark.parametrize("beside", [False, True], ids=["transport", "back end"])
def test_exchanges_between_pieces_are_done_anew_in_every_step_and_lie_in_no_graph(beside):
    device, switch, x = PretendGraphs(), Switch(), torch.ones(2)
    carrier = Carrier(device)
    lanes, transport = switch.carry_lanes(NoLanes(CPU)), switch.carry(carrier)  # type: ignore[arg-type]

    def work() -> torch.Tensor:
        carrier.out.copy_(x + 1)
        if beside:
            pending = lanes.start(carrier.carry, tag=TAG)
        else:
            pending = transport.all_to_all(carrier.into, carrier.out, recv_splits=(2,), send_splits=(2,), tag=TAG)
        other = x * 10  # what the other track does meanwhile
        return pending.wait() + other

    recording: Recording[torch.Tensor] = Recording(device)
    with switch.cutting(recording, None, exchanges=True):  # type: ignore[arg-type]  # nobody attends
        program = recording.record(work, STEP)
    assert device.num_graphs == 3
    x.fill_(3)
    assert program.replay(STEP).tolist() == [2 * 4 + 30] * 2
    assert carrier.in_graph == [False] * 4


def test_where_nothing_is_cut_what_is_started_has_started():
    device, switch = PretendGraphs(), Switch()
    carrier = Carrier(device)
    assert switch.carry_lanes(NoLanes(CPU)).start(carrier.carry, tag=TAG).wait() is carrier.into
    assert carrier.in_graph == [False, False]
