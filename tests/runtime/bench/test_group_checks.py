"""A group passes its checks as it is, and each fault that is planted into it is found and explained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep import Pending, ThreadGroup, run_ranks
from runtime.bench.group_checks import Bench, exchange_configs, group_checks, name_of, token_check
from runtime.failure.checkup import Finding, Outcome, look

pytestmark = pytest.mark.timeout(60)


class Bent:
    """A transport that changes one byte of what arrives in exchanges of one kind."""

    def __init__(self, transport, kind: str) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._kind = kind

    def all_to_all(self, recv: Tensor, send: Tensor, *, recv_splits, send_splits, tag) -> Pending[Tensor]:
        rows = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return rows.then(lambda value: self._bend(value, tag))

    def _bend(self, rows: Tensor, tag) -> Tensor:
        if tag.kind.name == self._kind and rows.numel() and tag.step:
            last = rows.view(torch.uint8).flatten()
            last[-1] ^= 0x40
        return rows

    def all_gather(self, row: Tensor, *, tag) -> Pending[Tensor]:
        return self._transport.all_gather(row, tag=tag)

    def abort(self, cause: BaseException) -> None:
        self._transport.abort(cause)

    def close(self) -> None:
        self._transport.close()


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
        captured = [each for each in findings if each.outcome is Outcome.NOT_CHECKED]
        assert len(captured) == 8
        assert captured[0].words == "a cpu has no graphs"


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
