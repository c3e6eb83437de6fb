"""A group passes its checks as it is, and each fault that is planted into it is found and explained."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from ep import Pending, ThreadGroup, run_ranks
from ep.config import BACK_ENDS
from ep.rows import HEADER_WORDS
from ep.wrapping import Wrapping
from runtime.bench import group_checks as group_checks_module
from runtime.bench.group_checks import (
    Bench,
    back_end_checks,
    exchange_configs,
    group_checks,
    name_of,
    token_check,
)
from runtime.failure.checkup import Finding, Outcome, look
from tests.ep.pretend_nccl_ep import World
from tests.runtime.pretend_graphs import PretendGraphs

pytestmark = pytest.mark.timeout(120)


class Bent(Wrapping):
    """A transport that changes one byte of what arrives in exchanges of one kind."""

    def __init__(self, transport, kind: str) -> None:
        super().__init__(transport)
        self._kind = kind

    def all_to_all(self, recv: Tensor, send: Tensor, *, recv_splits, send_splits, tag) -> Pending[Tensor]:
        rows = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return rows.then(lambda value: self._bend(value, tag))

    def _bend(self, rows: Tensor, tag) -> Tensor:
        if tag.kind.name == self._kind and rows.numel() and tag.step:
            last = rows.view(torch.uint8).flatten()
            last[-1] ^= 0x40
        return rows


def bench(transport) -> Bench:
    return Bench(transport=transport, device=torch.device("cpu"), ops="reference", graphs=None)


def look_all(transport) -> list[Finding]:
    return [look(check) for check in group_checks(bench(transport))]


def look_until_one_fails(transport) -> list[Finding]:
    found = []
    for check in group_checks(bench(transport)):
        found.append(look(check))
        if found[-1].outcome is Outcome.FAILED:
            transport.abort(RuntimeError(found[-1].words))
            break
    return found


def test_a_sound_group_passes_in_every_mode():
    torch.set_num_threads(1)
    for findings in run_ranks(2, look_all, timeout_s=60):
        assert [each.words for each in findings if each.outcome is Outcome.FAILED] == []
        modes = [each for each in findings if each.name.startswith("exchange") and each.outcome is Outcome.OK]
        assert len(modes) == 16
        left_out = [each for each in findings if each.outcome is Outcome.NOT_CHECKED]
        assert [each.words for each in left_out[:8]] == ["a cpu has no graphs"] * 8
        assert [each.name for each in left_out[8:]] == [
            *(f"exchange, {mode}{how}" for mode in BACK_ENDS for how in ("", ", captured")),
            "exchange, the fastest",
        ]
        assert all("which carries rows between GPUs, but device is cpu" in each.words for each in left_out[8:12])


def test_a_back_end_is_put_through_the_self_test_where_all_ranks_have_it(monkeypatch):
    """Over a library that pretends; a rank that lacks it keeps all from trying, or they would wait for it."""
    world = World()
    for name, module in world.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def look_at(transport, lacking: int | None) -> list[Finding]:
        world.transports[transport.rank] = transport
        lack = {"symmetric": "no heap"} | ({"nccl_ep": "no package"} if transport.rank == lacking else {})
        monkeypatch.setattr(threading.current_thread(), "lack", lack, raising=False)
        return [look(check) for check in back_end_checks(bench(transport))][:2]

    monkeypatch.setattr(group_checks_module, "refusal", lambda mode, _: threading.current_thread().lack.get(mode))
    for found in run_ranks(2, lambda transport: look_at(transport, None), timeout_s=60):
        assert (found[0].outcome, found[0].words) == (Outcome.OK, "every pattern arrived and came back")
        assert (found[1].outcome, found[1].words) == (Outcome.NOT_CHECKED, "a cpu has no graphs")
    assert world.alive == []
    found = run_ranks(2, lambda transport: look_at(transport, 1), timeout_s=60)
    assert [each[0].words for each in found] == ["rank 1 lacks it", "no package"]


@pytest.mark.parametrize("kind", ["DISPATCH", "COMBINE", "CHECK"])
def test_a_byte_that_changes_on_its_way_is_found_and_explained(kind):
    group: ThreadGroup[list[Finding]] = ThreadGroup(2, timeout_s=60)
    found: dict[int, list[Finding]] = {}

    def rank(transport):
        bent = Bent(transport, kind) if transport.rank == 1 else transport
        found[transport.rank] = look_until_one_fails(bent)
        return found[transport.rank]

    group.start(rank)
    with pytest.raises(RuntimeError):
        group.join()
    worst = found[1][-1]
    assert worst.outcome is Outcome.FAILED
    assert worst.name == ("transport" if kind == "CHECK" else "exchange, exact, straight, ranks back, run there")
    assert worst.means
    assert worst.tries


def look_captured(transport, *, bent: bool = False) -> list[Finding]:
    """Those that record, on a pretend device; bent: what comes back in replays is another byte."""
    device = PretendGraphs()
    if bent:
        transport = BentReplays(transport, "COMBINE", device)
    able = replace(bench(device.carry(transport)), graphs=lambda: device)
    here = [check for check in group_checks(able) if not any(name in check.name for name in BACK_ENDS)]
    return [look(check) for check in here if check.name.endswith("captured")]


class BentReplays(Bent):
    """Only once something was recorded, and in the first value of each row that comes back, behind its header."""

    def __init__(self, transport, kind: str, device: PretendGraphs) -> None:
        super().__init__(transport, kind)
        self._device = device

    def _bend(self, rows: Tensor, tag) -> Tensor:
        if tag.kind.name == self._kind and self._device.num_graphs and self._device.graph is None:
            rows.view(torch.uint8)[:, 8 * HEADER_WORDS + 1] ^= 0x40
        return rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_captured_exchanges_are_replayed_in_every_bounded_mode(ranks: int):
    for findings in run_ranks(ranks, look_captured, timeout_s=60):
        assert {(each.outcome, each.words) for each in findings} == {
            (Outcome.OK, "replayed with other rows, which came back right")
        }
        assert len(findings) == (8 if ranks > 1 else 4)


def test_a_replay_that_brings_back_something_else_is_found_and_explained():
    for findings in run_ranks(2, partial(look_captured, bent=True), timeout_s=60):
        assert {each.outcome for each in findings} == {Outcome.FAILED}
        assert all(each.words.startswith("replay 0: a sum is off by") for each in findings)
        assert findings[0].means == "this exchange cannot be replayed in a CUDA graph here, though it may work without"


def test_every_mode_is_built_and_named_once():
    names = [name_of(config) for config, _ in exchange_configs(4)]
    assert len(set(names)) == len(names) == 16
    assert {size for _, size in exchange_configs(4)} == {4, 2}
    assert len(exchange_configs(3)) == 8  # three ranks are no even nodes
    assert len(exchange_configs(1)) == 8


def test_tokens_that_differ_are_counted_up_to_there():
    same = look(token_check("a", lambda: [[1, 2], [3]], lambda: [[1, 2], [3]]))
    assert (same.outcome, same.words) == (Outcome.OK, "3 greedy tokens alike")
    other = look(token_check("a", lambda: [[1, 2], [3]], lambda: [[1, 9], [3]]))
    assert (other.outcome, other.words) == (Outcome.FAILED, "2 of 3 tokens alike before they differ")
