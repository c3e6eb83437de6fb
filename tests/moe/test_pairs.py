"""Pairs sorted by slot, in torch and in Triton's interpreter, against a list that is sorted by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe import pair_kernels, pairs
from moe.pairs import CHUNK, PairGroups

pytestmark = pytest.mark.interpret
Group = Callable[[Tensor, PairGroups], None]
EXAMPLE = torch.tensor([[1, -1], [0, 1], [-1, -1], [1, 0]])


@pytest.fixture(params=["torch", "triton"])
def group(request: pytest.FixtureRequest) -> Group:
    return {"torch": pairs.group_pairs, "triton": pair_kernels.group_pairs}[request.param]


def full_of_rubbish(num_rows: int, top_k: int, num_slots: int) -> PairGroups:
    groups = PairGroups.empty(num_rows, top_k, num_slots, device="cpu")
    for values in (groups.starts_L, groups.rows_M, groups.places_NK, groups.chunk_counts_CL):
        values.fill_(-77)
    return groups


def check(slots_NK: Tensor, groups: PairGroups) -> None:
    rows, top_k = slots_NK.shape
    flat = [(int(slots_NK[n, k]), n, k) for n in range(rows) for k in range(top_k)]
    expected = sorted([pair for pair in flat if pair[0] >= 0], key=lambda pair: pair[0])
    counts = [sum(slot == here for slot, _, _ in expected) for here in range(groups.num_slots)]
    assert groups.starts_L.diff().tolist() == counts
    assert groups.starts_L[0] == 0
    assert groups.rows_M[: len(expected)].tolist() == [n for _, n, _ in expected]
    places = {(n, k): place for place, (_, n, k) in enumerate(expected)}
    assert groups.places_NK.tolist() == [[places.get((n, k), -1) for k in range(top_k)] for n in range(rows)]


def test_the_docstrings_pairs_are_sorted(group: Group) -> None:
    groups = full_of_rubbish(4, 2, 2)
    group(EXAMPLE, groups)
    assert groups.starts_L.tolist() == [0, 2, 5]
    assert groups.rows_M[:5].tolist() == [1, 3, 0, 1, 3]
    assert groups.places_NK.tolist() == [[2, -1], [0, 3], [-1, -1], [4, 1]]


@pytest.mark.parametrize(("num_rows", "top_k", "num_slots"), [(0, 2, 3), (1, 1, 1), (3, 8, 9), (129, 3, 5)])
def test_any_sizes_are_sorted_by_slot_and_stay_in_order(
    num_rows: int, top_k: int, num_slots: int, group: Group
) -> None:
    noise = torch.Generator().manual_seed(num_rows)
    slots_NK = torch.rand(num_rows, num_slots + top_k, generator=noise).argsort(1)[:, :top_k]
    slots_NK = slots_NK.where(slots_NK < num_slots, -1)
    groups = full_of_rubbish(num_rows, top_k, num_slots)
    group(slots_NK, groups)
    check(slots_NK, groups)


@pytest.mark.parametrize("slot", [-1, 0, 2])
def test_all_rows_may_go_to_one_slot_or_nowhere(slot: int, group: Group) -> None:
    slots_NK = torch.full((CHUNK + 3, 1), slot)
    groups = full_of_rubbish(CHUNK + 3, 1, 3)
    group(slots_NK, groups)
    check(slots_NK, groups)


def test_slots_may_lie_between_other_fields_of_a_row(group: Group) -> None:
    wide = torch.full((4, 7), 1)
    wide[:, 2:4] = EXAMPLE
    groups = full_of_rubbish(4, 2, 2)
    group(wide[:, 2:4], groups)
    check(EXAMPLE, groups)


def test_more_chunks_than_are_added_up_at_once() -> None:
    slots_NK = torch.arange(66 * CHUNK).unsqueeze(1) % 3 - 1
    groups, expected = (full_of_rubbish(66 * CHUNK, 1, 2) for _ in range(2))
    pair_kernels.group_pairs(slots_NK, groups)
    pairs.group_pairs(slots_NK, expected)
    assert torch.equal(groups.starts_L, expected.starts_L)
    assert torch.equal(groups.places_NK, expected.places_NK)
    num_pairs = int(expected.starts_L[-1])
    assert torch.equal(groups.rows_M[:num_pairs], expected.rows_M[:num_pairs])
