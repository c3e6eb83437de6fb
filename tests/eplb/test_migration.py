"""A layer's experts travel between ranks; what must come out is what copying by hand gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep import CheckpointError, ThreadTransport, run_ranks
from eplb.migration import ExpertLayer, Fault, LayerTransfer, Pool, pool_bytes
from eplb.moves import CELL_BYTES, CHECKPOINT, Speeds, diff
from moe import ExpertBank, ExpertPlacement
from tests.eplb.banks import blobs, place, random_placement, table_of, whole_bank

LIMIT_S = 20.0


class Rank:
    """One rank's bank and map, and a transfer between two placements."""

    def __init__(
        self,
        transport: Any,
        whole: ExpertBank,
        old: ExpertPlacement,
        new: ExpertPlacement,
        *,
        limit: int = 4096,
        fetch: Any = None,
        speeds: Speeds | None = None,
    ) -> None:
        self.bank = place(whole, old, transport.rank)
        self.table = table_of(old, transport.rank)
        pool = Pool(places=old.slots_per_rank, blob_bytes=self.bank.blob_bytes, limit=limit)
        moves = diff(3, old, new, blob_bytes=self.bank.blob_bytes, speeds=speeds)
        layer = ExpertLayer(bank=self.bank, show=lambda to: self.table.write(table_of(to, transport.rank)))
        self.transfer = LayerTransfer(moves, layer=layer, pool=pool, transport=transport, fetch=fetch)

    def receive_all(self) -> int:
        steps = 0
        while not self.transfer.complete:
            self.transfer.beat(step=steps)
            steps += 1
        return steps


def on_ranks(size: int, fn: Callable[[ThreadTransport], Any]) -> list[Any]:
    return run_ranks(size, fn, timeout_s=LIMIT_S)


FORMATS = [(torch.float64, False), (torch.bfloat16, False), (torch.float32, True)]


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_slot_ends_with_the_bytes_of_its_expert(size: int, dtype: torch.dtype, fp8: bool):
    whole = whole_bank(11, seed=size, dtype=dtype, fp8=fp8)
    for seed in range(3):
        rng = random.Random(f"{size}:{seed}")
        slots = -(-11 // size) + seed  # as many copies more as there are ranks, or twice that
        old, new = (random_placement(size, slots, 11, rng, twice=seed == 2) for _ in range(2))

        limit = CELL_BYTES * rng.choice([16, 33, 1000])

        def run(transport: ThreadTransport, old=old, new=new, limit=limit) -> Rank:
            rank = Rank(transport, whole, old, new, limit=limit)
            rank.receive_all()
            assert all(map(torch.equal, blobs(rank.bank), blobs(place(whole, old, transport.rank))))
            rank.transfer.write()
            return rank

        for index, rank in enumerate(on_ranks(size, run)):
            for expert, blob in zip(new.experts_of(index), blobs(rank.bank), strict=True):
                assert expert == -1 or torch.equal(blob, whole.blob(expert)), f"rank {index}, expert {expert}"
            assert torch.equal(rank.table.slots_EX, table_of(new, index).slots_EX)
            assert torch.equal(rank.table.bounds_EX, table_of(new, index).bounds_EX)


def test_a_bank_of_fp8_carries_its_scales_in_its_blob():
    bank = whole_bank(3, seed=1, dtype=torch.float32, fp8=True)
    other = whole_bank(3, seed=2, dtype=torch.float32, fp8=True)
    other.write_blob(2, bank.blob(0))
    for mine, theirs in zip(bank.slot_weights(0, torch.float64), other.slot_weights(2, torch.float64), strict=True):
        assert torch.equal(mine, theirs)
    assert bank.scales is not None
    changed = replace(bank, scales=replace(bank.scales, down_Ldf=bank.scales.down_Ldf * 2))
    assert not torch.equal(changed.blob(0), bank.blob(0)), "a scale is part of the blob"


@pytest.mark.parametrize("size", [1, 7, 64, 4000])
def test_a_blob_can_be_copied_in_pieces_of_any_size(size: int):
    bank = whole_bank(3, seed=1, dtype=torch.float32, fp8=True)
    blob = torch.zeros(bank.blob_bytes, dtype=torch.uint8)
    for begin in range(0, bank.blob_bytes, size):
        for out, part in bank.parts(1, begin, blob[begin : begin + size]):
            out.copy_(part)
    assert torch.equal(blob, bank.blob(1))


def swapped(num_ranks: int) -> tuple[ExpertPlacement, ExpertPlacement]:
    """One expert a rank; each goes to the next rank."""
    slots = tuple(range(num_ranks))
    old = ExpertPlacement(num_ranks=num_ranks, slots_per_rank=1, slot_experts=slots)
    return old, ExpertPlacement(num_ranks=num_ranks, slots_per_rank=1, slot_experts=(*slots[1:], 0))


def test_no_beat_carries_more_than_the_limit_and_many_are_needed():
    whole = whole_bank(4, seed=1, dtype=torch.float64)
    limit = 4096
    sent: list[int] = []

    class Counting:
        def __init__(self, transport: ThreadTransport) -> None:
            self.inner, self.rank, self.size = transport, transport.rank, transport.size

        def all_to_all(self, recv: torch.Tensor, send: torch.Tensor, **how: Any) -> Any:
            sent.append(max(send.nbytes, recv.nbytes))
            return self.inner.all_to_all(recv, send, **how)

    def run(transport: ThreadTransport) -> int:
        return Rank(Counting(transport), whole, *swapped(4), limit=limit).receive_all()

    [steps] = set(on_ranks(4, run))
    assert max(sent) <= limit
    assert steps == -(-whole.blob_bytes // (limit - 8))


class FlippingABit:
    """A wire that changes one bit of what one rank gets in one beat."""

    def __init__(self, transport: ThreadTransport, *, rank: int, beat: int, byte: int) -> None:
        self.inner, self.rank, self.size = transport, transport.rank, transport.size
        self._beat, self._byte = beat if rank == transport.rank else -1, byte

    def all_to_all(self, recv: torch.Tensor, send: torch.Tensor, **how: Any) -> Any:
        def flip(rows: torch.Tensor) -> torch.Tensor:
            if how["tag"].step == self._beat:
                rows.view(-1)[self._byte] ^= 1
            return rows

        return self.inner.all_to_all(recv, send, **how).then(flip)


@pytest.mark.parametrize(("beat", "byte"), [(0, 0), (0, 4087), (1, 700), (5, 3)])
def test_a_flipped_bit_is_found_and_the_layer_stays_as_it_was(beat: int, byte: int):
    whole = whole_bank(3, seed=1, dtype=torch.float64)
    old, new = swapped(3)

    def run(transport: ThreadTransport) -> tuple[Fault | None, bool]:
        rank = Rank(FlippingABit(transport, rank=1, beat=beat, byte=byte), whole, old, new)
        rank.receive_all()
        same = all(map(torch.equal, blobs(rank.bank), blobs(place(whole, old, transport.rank))))
        return rank.transfer.fault, same and torch.equal(rank.table.slots_EX, table_of(old, transport.rank).slots_EX)

    assert on_ranks(3, run) == [(None, True), (Fault.CHECKSUM, True), (None, True)]


def test_a_layer_with_a_fault_cannot_be_written():
    whole = whole_bank(2, seed=1, dtype=torch.float64)

    def run(transport: ThreadTransport) -> None:
        rank = Rank(FlippingABit(transport, rank=0, beat=0, byte=0), whole, *swapped(2))
        rank.receive_all()
        if transport.rank == 0:
            with pytest.raises(AssertionError, match="checksum"):
                rank.transfer.write()

    on_ranks(2, run)


def copied() -> tuple[ExpertPlacement, ExpertPlacement]:
    """Two experts on rank 0 are copied to rank 1."""
    old = ExpertPlacement(num_ranks=2, slots_per_rank=3, slot_experts=(0, 1, -1, 2, -1, -1))
    return old, ExpertPlacement(num_ranks=2, slots_per_rank=3, slot_experts=(0, 1, -1, 2, 0, 1))


FROM_FILE = Speeds(ranks=1e9, checkpoint=100e9)


def test_what_comes_from_the_checkpoint_is_the_same_and_crosses_no_wire():
    whole = whole_bank(3, seed=1, dtype=torch.bfloat16)
    old, new = copied()
    asked: list[tuple[int, int, int]] = []

    def run(transport: ThreadTransport) -> Rank:
        def fetch(layer: int, expert: int, out: torch.Tensor) -> None:
            asked.append((transport.rank, layer, expert))
            out.copy_(whole.blob(expert))

        rank = Rank(transport, whole, old, new, limit=1 << 14, fetch=fetch, speeds=FROM_FILE)
        assert {haul.source for haul in rank.transfer.moves.hauls} == {CHECKPOINT}
        rank.receive_all()
        rank.transfer.write()
        return rank

    ranks = on_ranks(2, run)
    assert asked == [(1, 3, 0), (1, 3, 1)]
    for slot, expert in enumerate(new.experts_of(1)):
        assert torch.equal(ranks[1].bank.blob(slot), whole.blob(expert))


@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), CheckpointError(tensor="t", file="f", expected="shape", found="none")],
)
def test_a_checkpoint_that_cannot_be_read_is_a_fault_and_not_an_end(error: Exception):
    whole = whole_bank(3, seed=1, dtype=torch.bfloat16)

    def fetch(layer: int, expert: int, out: torch.Tensor) -> None:
        raise error

    def run(transport: ThreadTransport) -> tuple[Fault | None, str]:
        rank = Rank(transport, whole, *copied(), limit=1 << 14, fetch=fetch, speeds=FROM_FILE)
        rank.receive_all()
        return rank.transfer.fault, rank.transfer.why

    assert on_ranks(2, run) == [(None, ""), (Fault.CHECKPOINT, str(error))]


def test_a_pool_says_what_it_takes_without_taking_it():
    pool = Pool(places=3, blob_bytes=1000, limit=4096)
    assert pool.num_bytes == pool_bytes(places=3, blob_bytes=1000, limit=4096) == 3000 + 2 * 4096
